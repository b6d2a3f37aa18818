"""Messages of a store as files that other tools read: JSON lines, CSV, Arrow, Parquet, or a file for each body.

Owns the order of steps of an export.  It opens stores read-only and never changes one.  An output has its name only when it
is complete (`output_file`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from rmqstore.files.output_file import OutputFile, OutputFolder
from rmqstore.offline.export_files import ArrowFile, Csv, ExportOptions, Files, JsonLines, Sink, compressed, layout_of
from rmqstore.offline.export_source import ExportDamage, Source
from rmqstore.selection import Selection
from rmqstore.store.message_store import MessageStore

__all__ = ["ExportOptions", "ExportReport", "Selection", "export"]


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    `output` is ``-`` for a file that the caller opened, and empty where none was made, as the store has no such topic.
    `corrupt_records` are messages whose CRC or compression is wrong: left out with ``skip``, among `messages` with ``report``.
    `damaged_stretches` and `damaged_size` (bytes) are parts of the log without a record, and places of tiered storage, without a
    size.  `notes` are those of tiered storage.
    """

    output: str
    format: str
    messages: int
    corrupt_records: int
    damaged_stretches: int
    damaged_size: int
    columns: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())


def export(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | IO[bytes],
    selection: Selection | None = None,
    options: ExportOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write messages of the store at `path` to a file, in the order of the log; the store is only read.

    Parameters
    ----------
    path : path
        The store's root; a broker may be running on it.  What is put after the call began is left out.
    output : path or binary file
        The format ``files`` makes a folder.  A path has its name only when all is written; a file that the caller opened is
        neither closed nor forced to the disk.
    selection : Selection, optional
        By default everything.
    options : ExportOptions, optional
        By default JSON lines, or what the ending of `output` says.
    progress : callable, optional
        Called with (bytes of the log done, bytes in all).

    Returns
    -------
    ExportReport

    Raises
    ------
    CorruptionError, ChecksumError
        Damage, with ``corrupt="fail"``; there is no output then.
    StoreError
        There is no store, or the output exists.
    ValueError
        An option that there is not, or one that does not fit the format.
    MissingDependencyError
        The format needs a library that is not installed.
    """
    options = options or ExportOptions()
    target = os.fspath(output) if isinstance(output, (str, os.PathLike)) else None
    layout = layout_of(options, target)
    read_only = [each for each in (path, options.tiered) if each is not None]
    # That the output cannot be written is said before anything is read.
    made: OutputFile | OutputFolder | None = None
    if target is not None and layout.format == "files":
        made = OutputFolder(target, outside=read_only)
    elif target is not None:
        made = OutputFile(target, force=options.force, outside=read_only)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            MessageStore.open(path, config=options.config, read_only=True, tiered=options.tiered)
        )
        damage = ExportDamage(store.commit_log, options.corrupt)
        store.older.pass_over(damage)
        source = Source(store, Selection() if selection is None else selection.check_times(), damage, progress)
        source.tell(source.begin)
        opened: Any = output if made is None else stack.enter_context(made)
        if layout.format in ("arrow", "parquet"):
            sink = Sink(opened)
            stack.callback(sink.abandon)
            writer: Any = ArrowFile(sink, layout, made is not None and opened.seekable())
        elif layout.format == "files":
            writer = Files(opened, layout, not store.older.one_log)
            stack.callback(writer.manifest.close)
        else:
            packed = stack.enter_context(compressed(opened, layout.compression))
            writer = (JsonLines if layout.format == "jsonl" else Csv)(packed, layout)
        number = 0
        if layout.format in ("arrow", "parquet"):
            for batch in source.batches(layout.columns):
                if batch.num_rows:
                    writer.batch(batch)
                    number += batch.num_rows
        else:
            for message in source.messages(layout.columns):
                writer.message(message)
                number += 1
        writer.close()
        source.tell(source.end)
        topics = {*(source.selection.topics or ())}
        if options.only_known_topics and made is not None and not number and topics and topics.isdisjoint(store.topics()):
            made.drop()
            target = ""
    return ExportReport(
        "-" if target is None else target, layout.format, number, damage.records, damage.stretches, damage.size,
        layout.columns, tuple(store.older.notes),
    )  # fmt: skip
