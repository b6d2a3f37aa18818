"""rmqstore verify: everything that is wrong in a store, a finding a line, and how many of each kind.

Owns the lines and the summary; the findings are `rmqstore.offline.verify`'s.  It reads only and repairs nothing.
Invariant: a finding is printed as soon as it is known, so that an interrupted run has shown what it found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator

import click

from rmqstore.cli.errors import typed
from rmqstore.cli.group import FOUND_NOTHING
from rmqstore.cli.next_steps import NextSteps
from rmqstore.cli.options import Given, note_assumed, path_argument, store_options, tiered_option
from rmqstore.cli.terminal import Printer, Progress, escape, note
from rmqstore.config import StoreConfig
from rmqstore.errors import Finding, GeometryError
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.flatfile.flat_verify import verify_flat
from rmqstore.offline.verify import verify
from rmqstore.store.message_store import MessageStore


def _tells_geometry(path: str) -> bool:
    try:
        StoreConfig.infer(path)
    except GeometryError:
        return False
    return True


def _findings(path: str, config: StoreConfig | None, given: Given, progress: Progress) -> Iterator[Finding]:
    has_log = os.path.isdir(os.path.join(path, "commitlog"))
    if has_log or not given.tiered:
        yield from verify(path, config, progress)
    if given.tiered:
        with contextlib.closing(FlatStore(given.tiered, path)) as flat_store:
            for text in flat_store.notes:
                note(f"note: tiered storage: {text}")
            yield from verify_flat(flat_store, progress)
            if config is not None and has_log:
                with MessageStore.open(path, config=config, read_only=True) as store:
                    begins = {key: store.min_queue_offset(*key) for key in store.queues.keys()}
                yield from flat_store.gaps(begins)


@click.command(name="verify")
@path_argument
@tiered_option
@store_options
def verify_command(path: str, given: Given) -> None:
    """Look for everything that is wrong in a store; exit code 1 if anything is.

    Compares the log with itself (lengths, offsets, CRCs) and queues, index, checkpoint and config files with the log;
    with --tiered also flat files with each other, with their metadata, and units and index files with their records.
    """
    config: StoreConfig | None
    try:
        config = given.config(path, read_only=True)
        note_assumed(config, ("index_tags",))
        if "message_delay_level" in config.assumed:
            note(
                "note: the store does not tell message_delay_level; when delayed messages are due is not compared "
                "(give -o message_delay_level=...)"
            )
    except GeometryError:
        if (given.options or given.config_file is not None) and _tells_geometry(path):
            raise  # The options are wrong, not the store.
        config = None  # That the geometry cannot be told is a finding.
    printer = Printer(given.as_json)
    kinds: Counter[str] = Counter()
    following = NextSteps(path, given.options, given.config_file, given.tiered)
    with Progress("verifying", "bytes") as progress:
        for finding in _findings(path, config, given, progress):
            kinds[finding.kind] += finding.num
            following.take(finding)
            if given.as_json:
                printer.json_line({"type": "finding", **dataclasses.asdict(finding)})
            else:
                printer.line(f"{escape(finding.path)}:{finding.pos}: {finding.kind}: {escape(typed(finding.detail))}")
            sys.stdout.flush()
    if given.as_json:
        summary = {"type": "summary", "findings": kinds.total(), "kinds": dict(sorted(kinds.items()))}
        printer.json_line(summary | ({"next": dict(following.steps())} if kinds else {}))
    elif not kinds:
        printer.line("nothing is wrong")
    else:
        printer.table(f"{kinds.total()} findings", ("kind", "number"), sorted(kinds.items()))
        printer.line()
        printer.line("what to do next")
        for names, step in following.steps():
            printer.line(f"  {names}: {escape(step)}")
    if kinds:
        click.get_current_context().exit(FOUND_NOTHING)
