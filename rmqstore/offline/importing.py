"""Import messages from files into a store: JSON lines, Arrow, Parquet.

`import_rows` reads the files, and `MessageStore.put_table` checks the messages.  An existing store gets no row before every row of
every file was checked.  A new store has its name only once it is complete; until then its name ends in ``.part``.  Rows are put in
the order of the files.  Memory does not grow with their number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmqstore.config import StoreConfig
from rmqstore.config.saved_options import save_options
from rmqstore.errors import InvalidMessageError, StoreError
from rmqstore.files.listing import is_empty
from rmqstore.files.output_file import OutputFolder
from rmqstore.offline.import_rows import Chunk, Input, arrow_chunks, reconciled, row_chunks
from rmqstore.store.columns import import_pyarrow
from rmqstore.store.message_store import MessageStore
from rmqstore.store.opening import saved_config

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["IMPORT_FORMATS", "ImportOptions", "ImportReport", "import_files"]

IMPORT_FORMATS = ("jsonl", "arrow", "parquet")
"""The formats of files that can be imported."""

_ROW = re.compile(r"row ([0-9]+):? (.*)", re.DOTALL)


@dataclass(frozen=True)
class ImportOptions:
    """Options of an import.

    `config` None means `StoreConfig.infer`, RocketMQ's defaults for a new store; `format` None means the format of each file's
    ending, or else of its content.  `topic`, `queue_id`, `tags`, `keys` replace those of all rows.  `keep_timestamps` keeps the
    store times of the files; they must not fall, nor be before the store's last message.
    """

    config: StoreConfig | None = None
    format: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    tags: str | None = None
    keys: Sequence[str] | None = None
    keep_timestamps: bool = False

    @property
    def literals(self) -> dict[str, Any]:
        """dict: the columns with one value for all rows, and their values."""
        values = {"topic": self.topic, "queue_id": self.queue_id, "tags": self.tags, "keys": self.keys}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ImportReport:
    """The result of `import_files`: `messages`, from `first_phy_offset` to `end_phy_offset`; `created` if the store is new."""

    path: str
    created: bool
    messages: int
    first_phy_offset: int
    end_phy_offset: int


def import_files(
    path: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    options: ImportOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_stop: Callable[[int, str], None] | None = None,
) -> ImportReport:
    """Put the rows of files into the store at `path`, after its messages; a missing store is created.

    The columns are those of `MessageStore.put_table`, with ``body_encoding`` next to a body that is text.

    Parameters
    ----------
    path : path
        No other process may write to the store.
    files : sequence of path
        ``-`` is standard input.
    options : ImportOptions, optional
    progress : callable, optional
        Called with (bytes done, bytes in all); every file counts twice, for checking and for putting.
    on_stop : callable, optional
        Called if an import into an existing store ends early, with (number of messages that stay in it, place of the last one).

    Returns
    -------
    ImportReport

    Raises
    ------
    InvalidMessageError
        A row cannot be read or stored; the message has file and line (row for Arrow and Parquet).  Nothing was put.
    StoreError
        A file is not of its format, the folder is not empty and has no store, or the disk has no room for the rows; nothing was
        put.
    StoreLockedError
        A broker or another process writes to the store; nothing was put.
    OSError, DiskFullError
        A new store does not exist then; an existing one keeps the messages that `on_stop` was called with.
    MissingDependencyError
        pyarrow is not installed.
    """
    import_pyarrow()
    options = options or ImportOptions()
    root = os.fspath(path)
    if not root:
        # It would be the working directory, which the new store would replace.
        raise StoreError(
            "the name of the store is empty; give a store's root (the folder that holds commitlog/), or a name that is free"
        )
    if [os.fspath(each) for each in files].count("-") > 1:
        raise StoreError("standard input is given twice; give - once")
    # A store without a message has no segment.
    created = not (os.path.isdir(os.path.join(root, "commitlog")) or os.path.isfile(os.path.join(root, "checkpoint")))
    if created and os.path.lexists(root) and not (os.path.isdir(root) and is_empty(root)):
        raise StoreError(
            "there is no store here, and the folder is not empty; give a store's root (the folder that holds commitlog/), or a "
            "name that is free",
            root,
        )
    format = options.format
    if format is not None and format not in IMPORT_FORMATS:
        raise ValueError(f"format is {format!r}; give {', '.join(IMPORT_FORMATS[:-1])} or {IMPORT_FORMATS[-1]}")
    with contextlib.ExitStack() as stack:
        inputs = []
        for each in files:
            inputs.append(Input(os.fspath(each), format))
            stack.callback(inputs[-1].close)
        job = _Import(inputs, options, progress)
        config = options.config
        if created:
            return job.into_new(root, config or StoreConfig())
        return job.into(root, config or saved_config(root), on_stop)


class _Import:
    def __init__(
        self, inputs: list[Input], options: ImportOptions, progress: Callable[[int, int], None] | None
    ):
        self.inputs = inputs
        self.literals = options.literals
        self.keep_timestamps = options.keep_timestamps
        self.progress = progress
        self.size = sum(each.size for each in inputs)
        self.put = 0
        self.last_place = ""

    def chunks(self, already: int, passes: int) -> Iterator[Chunk]:
        before = already * self.size
        for input in self.inputs:
            for chunk in row_chunks(input) if input.format == "jsonl" else arrow_chunks(input):
                yield dataclasses.replace(chunk, table=reconciled(chunk.table, self.literals))
                if self.progress is not None:
                    self.progress(before + input.done(), max(passes * self.size, 1))
            before += input.size
        if self.progress is not None:
            self.progress(before, max(passes * self.size, 1))

    def each(self, chunk: Chunk, call: Callable[..., Any], check: Callable[..., Any]) -> Any:
        """Call `call` with the rows of `chunk`; if it fails without naming the row, find it with `check`."""
        try:
            return self._with(chunk.table, call)
        except (InvalidMessageError, TypeError, OverflowError) as error:
            text = getattr(error, "message", str(error))
            row = _ROW.match(text)
            if row is not None:
                raise InvalidMessageError(f"{chunk.place(int(row[1]))}: {row[2]}") from None
            for number in range(chunk.table.num_rows):
                try:
                    self._with(_one_row(chunk.table, number), check)
                except (InvalidMessageError, TypeError, OverflowError) as its_error:
                    its_text = re.sub("^row 0:? ", "", getattr(its_error, "message", str(its_error)))
                    raise InvalidMessageError(f"{chunk.place(number)}: {its_text}") from None
            raise InvalidMessageError(f"{chunk.span()}: {text}") from None

    def _with(self, table: pa.Table, call: Callable[..., Any]) -> Any:
        return call(table, keep_timestamps=self.keep_timestamps, **self.literals)

    def into_new(self, root: str, config: StoreConfig) -> ImportReport:
        """Put the rows into a new store, all or none, in one pass."""
        os.makedirs(os.path.dirname(os.path.realpath(root)), exist_ok=True)
        folder = OutputFolder(root)
        try:
            with (
                folder as made,
                MessageStore.open(made.part, config=config.replace(clean_resource_interval=0)) as store,
            ):
                save_options(store.path, config)
                for chunk in self.chunks(0, 1):
                    self.put += len(self.each(chunk, store.put_table, store.check_table))
                first, end = store.commit_log.min_offset, store.commit_log.max_offset
                if not self.put:
                    # A folder without a segment is not a store, and would block the next import.
                    made.drop()
                    return ImportReport(root, False, 0, 0, 0)
        except StoreError:
            if not folder.was_taken:
                raise
            raise StoreError(
                "somebody else has made this while the import ran, and nothing was put; if it is a store, import once more "
                "to put the messages after those that it has",
                root,
            ) from None
        return ImportReport(root, True, self.put, first, end)

    def into(self, root: str, config: StoreConfig, on_stop: Callable[[int, str], None] | None) -> ImportReport:
        """Put the rows into an existing store, after all of them were checked."""
        with MessageStore.open(root, config=config.replace(clean_resource_interval=0)) as store:
            last, size, free = None, 0, shutil.disk_usage(root).free
            # The newest segment may have its space on disk already.
            room = free + store.commit_log.segment_size
            for chunk in self.chunks(0, 2):
                self.each(chunk, store.check_table, store.check_table)
                size += chunk.table.nbytes
                if size > room:
                    raise StoreError(
                        f"the rows up to {chunk.place(-1)} alone take {size} bytes, and the disk has {free} free; nothing was put. "
                        "Make room, or import fewer rows",
                        root,
                    )
                if self.keep_timestamps:
                    last = self._check_times(chunk, last)
            first = store.commit_log.max_offset
            try:
                for chunk in self.chunks(1, 2):
                    self.put += len(self.each(chunk, store.put_table, store.check_table))
                    self.last_place = chunk.place(-1)
            except BaseException:
                if on_stop is not None:
                    on_stop(self.put, self.last_place)
                raise
            return ImportReport(root, False, self.put, first, store.commit_log.max_offset)

    def _check_times(self, chunk: Chunk, last: Any) -> Any:
        # Within a chunk the store checks them.
        times = chunk.table.column("store_timestamp")
        if len(times) and last is not None and _milliseconds(times[0]) < last:
            raise InvalidMessageError(
                f"{chunk.place(0)}: the store timestamp is before that of the row in front; sort by store_timestamp"
            )
        return _milliseconds(times[-1]) if len(times) else last


def _one_row(table: pa.Table, number: int) -> pa.Table:
    # A slice still has the lists and maps of other rows, and a cast reads all of them.
    pa = import_pyarrow()
    try:
        return table.take(pa.array([number]))
    except pa.ArrowNotImplementedError:
        return table.slice(number, 1)


def _milliseconds(value: Any) -> int:
    pa = import_pyarrow()
    if pa.types.is_timestamp(value.type):
        value = value.cast(pa.timestamp("ms", value.type.tz), safe=False).cast(pa.int64())
    return int(value.as_py())
