"""rmqstore verify: findings, one a line as soon as they are known, their numbers by kind, and the next steps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import click

from rmqstore.cli.errors import typed
from rmqstore.cli.group import FOUND_NOTHING
from rmqstore.cli.options import Given, note_assumed, path_argument, store_options, tiered_option
from rmqstore.cli.terminal import Printer, Progress, escape, note
from rmqstore.config import StoreConfig
from rmqstore.errors import Finding, GeometryError
from rmqstore.flatfile.flat_store import FlatStore
from rmqstore.flatfile.flat_verify import verify_flat
from rmqstore.offline.verify import verify
from rmqstore.rocksdb.database import queue_databases
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
    """Check a store for damage and inconsistencies.

    Checks the lengths, offsets and CRCs in the log, and compares queues, index, checkpoint and config files with it. With
    --tiered, also compares the flat files with each other, with their metadata, and with their units and index files. The
    exit code is 1 if there are findings.
    """
    config: StoreConfig | None
    try:
        config = given.config(path, read_only=True)
        note_assumed(config, ("index_tags",))
        if "message_delay_level" in config.assumed:
            note(
                "note: the store does not record message_delay_level; due times of delayed messages are not checked "
                "(set it with -o message_delay_level=...)"
            )
    except GeometryError:
        if (given.options or given.config_file is not None) and _tells_geometry(path):
            raise  # The options are wrong, not the store.
        config = None  # Reported as a finding.
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
        printer.line("next steps")
        for names, step in following.steps():
            printer.line(f"  {names}: {escape(step)}")
    if kinds:
        click.get_current_context().exit(FOUND_NOTHING)


_LOG = (
    "bad_magic", "bad_size", "bad_length", "bad_phy_offset", "bad_body_crc", "bad_prop_crc", "bad_blank", "missing_blank",
)  # fmt: skip
_OF_UNITS = ("missing_unit", "bad_unit", "dangling_unit", "gap_in_queue")
_DAMAGED = (
    "restore the segment from a backup or a slave; without one it cannot be repaired: {export} --corrupt skip exports the "
    "undamaged messages, {recover} --mode skip keeps those after the damage"
)
_LOST = (
    "mount the disk of the segments, or restore them from a backup or a slave; without them it cannot be repaired: {export} "
    "--corrupt skip exports the remaining messages, and rebuild and recover require the number of units to drop (--drop-units)"
)
_AS_IT_IS = "cannot be repaired: the message was stored this way; {export} exports all messages"
_BODY = "cannot be repaired: the message was stored this way; {export} --corrupt report exports it as stored"
_FURTHER = (
    "{rebuild} --what consumequeue writes the missing units; a record with wrong queues cannot be repaired"
)
_QUEUES, _INDEX = "{rebuild} --what consumequeue", "{rebuild} --what index"
# A broker with storeType=defaultRocksDB does not read the queue files of a rebuild without --rocksdb.
_QUEUE_DATABASE = (
    "{rebuild} --what consumequeue --rocksdb rebuilds the database from the log, and keeps the old one next to it"
)
_INDEX_DATABASE = (
    "stop the broker and restore the folder from a backup; without one it cannot be repaired: rmqstore query finds keys in the "
    "log, {pending} lists pending messages"
)
_SETTINGS = (
    "restore the file or database from a backup or from mqadmin; without one it cannot be repaired: rmqstore settings {path} "
    "shows the rest"
)
_POP_RECORDS = (
    "stop the broker and restore the folder from a backup; without one it cannot be repaired: rmqstore settings {path} shows "
    "the rest"
)
_TIERED = (
    "restore the files of tiered storage from a backup; without one it cannot be repaired: {export} --corrupt skip exports the "
    "rest"
)
_GAP = (
    "restore segments of the local log, or files of tiered storage, from a backup; without one it cannot be repaired: {export} "
    "--corrupt skip exports the rest"
)
_DLEDGER = "cannot be repaired: rmqstore does not read DLedger's log; {export} exports the messages before it"

# In the order of the steps: files, the log, structures built from the log.
_STEPS: dict[str, str] = {
    "interrupted_rebuild": "first run the same rebuild again, which finishes it",
    "geometry": "verify again with the options that the finding names, as -o NAME=VALUE or --config broker.conf",
    "file": "",
    "missing_segment": _LOST,
    **dict.fromkeys(_LOG, _DAMAGED),
    "stale_tail": "{recover}",
    **dict.fromkeys(("missing_prop_crc", "bad_inner_batch", "bad_topic"), _AS_IT_IS),
    "bad_body": _BODY,
    "bad_multi_dispatch": _FURTHER,
    "bad_checkpoint": "move the file away, then {recover}",
    **dict.fromkeys(_OF_UNITS, _QUEUES),
    **dict.fromkeys(("missing_index", "bad_index", "missing_entry", "bad_entry"), _INDEX),
    "queues_behind_log": "start the broker, which completes its queues; or {rebuild} --what consumequeue --rocksdb",
    "second_database": "move away the folder that the broker does not use "
    "(useSeparateStorePathForRocksdbCQ=true uses consumequeue_rocksdb)",
    **dict.fromkeys(("bad_database", "stale_unit"), _QUEUE_DATABASE),
    "damaged_database": _INDEX_DATABASE,
    "missing_index_entry": "the database cannot be repaired: rmqstore query finds the messages in the log; {rebuild} --what "
    "index builds index files, which it reads too",
    "bad_index_entry": "the database cannot be repaired: rmqstore query skips wrong entries; {rebuild} --what index builds "
    "index files, which it reads too",
    **dict.fromkeys(("bad_consumer_offset", "bad_settings"), _SETTINGS),
    "bad_pop_record": _POP_RECORDS,
    **dict.fromkeys(("bad_timer", "bad_transaction"), "cannot be repaired: {pending} lists pending messages and problems"),
    "gap": _GAP,
    "not_read": "cannot be repaired: rmqstore does not read it; move it away if it does not belong to the store",
    "not_checked": "install the library, or free the space, that the finding names; then verify again",
    **dict.fromkeys(
        ("bad_metadata", "bad_record", "duplicate_record", "missing_file", "not_indexed", "not_queued", "overlap",
         "wrong_queue"), _TIERED,
    ),
}  # fmt: skip
_FILES = {
    "commitlog": "move foreign files away, restore a short or missing segment from a backup or a slave; then {recover}",
    "consumequeue": _QUEUES,
    "batchconsumequeue": _QUEUES,
    "consumequeue_ext": _QUEUES,
    "index": _INDEX,
    "config": _SETTINGS,
    "": "move the file away, then verify again",
}
_DATABASES = {"config": _SETTINGS, "kvStore": _POP_RECORDS}
_CLOSED = "give this user read access (chmod, chown), then verify again: it was not checked, and a rebuild would fail"
_UNKNOWN = "see the kind in docs/formats.md"


def _lasting(config_file: str) -> str:
    # A pipe, like that of a shell's <(...), will not exist later.
    is_file = os.path.isfile(config_file) and not os.path.abspath(config_file).startswith(("/dev/", "/proc/"))
    return config_file if is_file else "broker.conf"


def _is_closed(path: str) -> bool:
    # Files in an unreadable folder are invisible: test the folder.
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return not os.access(path, needed, effective_ids=os.access in os.supports_effective_ids)


def _is_below(path: str, folder: str) -> bool:
    return os.path.abspath(path).startswith(os.path.abspath(folder) + os.sep)


class NextSteps:
    """Collects the kinds of findings of the store at `path`, and says what to do about each.

    The commands to come need what was given as ``-o``, ``--config`` and ``--tiered`` too.
    """

    def __init__(
        self, path: str, options: Iterable[str] = (), config_file: str | None = None, tiered: str | None = None
    ):
        self._path = path
        given = [*(["--config", _lasting(config_file)] if config_file is not None else [])]
        for option in options:
            given += ["-o", option]
        quoted = shlex.quote(path)
        end = "".join(f" {shlex.quote(each)}" for each in given)
        self._names = {
            "path": quoted,
            "recover": f"rmqstore recover {quoted}{end}",
            "rebuild": f"rmqstore rebuild {quoted}{end}",
            "export": f"rmqstore export {quoted}{end}" + (f" --tiered {shlex.quote(tiered)}" if tiered else ""),
            "pending": f"rmqstore pending {quoted}{end}",
        }
        self._queue_databases = queue_databases(path)
        self._tiered = [os.path.join(path, "tiered_index_file"), *([tiered] if tiered else [])]
        self._steps: dict[str, set[str]] = {}

    def take(self, finding: Finding) -> None:
        """Note the kind of a finding, and its part of the store."""
        step = _STEPS.get(finding.kind, _UNKNOWN)
        part = os.path.relpath(finding.path, self._path).split(os.sep)[0]
        if finding.kind == "file":
            step = _CLOSED if _is_closed(finding.path) else _FILES.get(part, _FILES[""])
        elif finding.path in self._queue_databases and finding.kind in (*_OF_UNITS, "bad_checkpoint"):
            step = _QUEUE_DATABASE
        elif finding.kind == "damaged_database":
            step = _DATABASES.get(part, step)
        elif finding.kind == "not_checked" and part.startswith("dledger-"):
            step = _DLEDGER
        elif step in (_DAMAGED, _QUEUES, _INDEX) and any(_is_below(finding.path, each) for each in self._tiered):
            # A rebuild covers the local log only.
            step = _TIERED
        self._steps.setdefault(step, set()).add(finding.kind)

    def steps(self) -> list[tuple[str, str]]:
        """Return kinds of findings and what to do about them, in order."""
        order = list(_STEPS)
        last = len(order)

        def rank(kinds: set[str]) -> int:
            return min(order.index(kind) if kind in _STEPS else last for kind in kinds)

        rows = sorted(self._steps.items(), key=lambda item: (rank(item[1]), item[0]))
        return [(", ".join(sorted(kinds)), step.format(**self._names)) for step, kinds in rows]
