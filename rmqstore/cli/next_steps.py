"""What to do about what `verify` found: one short line a kind, with the command that comes next.

Owns which command repairs which kind of finding of a RocketMQ store.  It does nothing itself, and judges no finding; of a file
or folder it asks whether this user may read it, as a rebuild may not either.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from rmqstore.errors import Finding
from rmqstore.rocksdb.places import queue_databases

__all__ = ["NextSteps"]

_LOG = (
    "bad_magic", "bad_size", "bad_length", "bad_phy_offset", "bad_body_crc", "bad_prop_crc", "bad_blank", "missing_blank",
)  # fmt: skip
_OF_UNITS = ("missing_unit", "bad_unit", "dangling_unit", "gap_in_queue")
_DAMAGED = (
    "take the segment from a backup or a slave; without one nothing repairs it: {export} --corrupt skip takes out what is whole, "
    "{recover} --mode skip goes on after it"
)
_LOST = (
    "mount the disk of the segments, or take them from a backup or a slave; without them nothing repairs it: {export} --corrupt "
    "skip takes out what is there, and a rebuild or recovery first wants to know how many units go (--drop-units)"
)
_AS_IT_IS = "nothing repairs it: the message was stored so; {export} takes out all messages"
_BODY = "nothing repairs it: the message was stored so; {export} --corrupt report writes it as it is stored"
_FURTHER = (
    "{rebuild} --what consumequeue writes the units that a queue lacks; nothing repairs a record that says it wrongly"
)
_QUEUES, _INDEX = "{rebuild} --what consumequeue", "{rebuild} --what index"
# A rebuild without --rocksdb writes queue files, which a broker with storeType=defaultRocksDB does not read.
_QUEUE_DATABASE = (
    "{rebuild} --what consumequeue --rocksdb writes the database again from the log, and keeps the old one next to it"
)
_INDEX_DATABASE = (
    "take the folder from a backup while no broker runs; without one nothing repairs it: rmqstore query finds keys in the log, "
    "{pending} lists what waits"
)
_SETTINGS = (
    "take the file or database from a backup or from mqadmin; without one nothing repairs it: rmqstore settings {path} shows "
    "what is left"
)
_POP_RECORDS = (
    "take the folder from a backup while no broker runs; without one nothing repairs it: rmqstore settings {path} shows what is "
    "left"
)
_TIERED = (
    "take the files of tiered storage from a backup; without one nothing repairs it: {export} --corrupt skip takes out the "
    "rest"
)
_GAP = (
    "take segments of the local log, or files of tiered storage, from a backup; without one nothing repairs it: {export} "
    "--corrupt skip takes out the rest"
)
_DLEDGER = "nothing repairs it: this package does not read DLedger's log; {export} takes out what is before it"

# In the order in which they are done: files, the log, what follows from the log.
_STEPS: dict[str, str] = {
    "interrupted_rebuild": "run the same rebuild again, which finishes it; nothing else before that",
    "geometry": "give the options that the sentence names as -o NAME=VALUE, or --config broker.conf, to verify again",
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
    "second_database": "move away the folder that the finding names, or the other one where the broker uses this one "
    "(useSeparateStorePathForRocksdbCQ=true uses consumequeue_rocksdb)",
    **dict.fromkeys(("bad_database", "stale_unit"), _QUEUE_DATABASE),
    "damaged_database": _INDEX_DATABASE,
    "missing_index_entry": "nothing repairs the database: rmqstore query finds the messages in the log; {rebuild} --what index "
    "writes index files, which it reads too",
    "bad_index_entry": "nothing repairs the database: rmqstore query skips wrong entries; {rebuild} --what index writes index "
    "files, which it reads too",
    **dict.fromkeys(("bad_consumer_offset", "bad_settings"), _SETTINGS),
    "bad_pop_record": _POP_RECORDS,
    **dict.fromkeys(("bad_timer", "bad_transaction"), "nothing repairs it: {pending} lists what waits, with what is wrong"),
    "gap": _GAP,
    "not_read": "nothing repairs it: this package does not read it; move it elsewhere where it is no part of the store",
    "not_checked": "do what the sentence says (install what is missing, or make room for it), then verify again",
    **dict.fromkeys(
        ("bad_metadata", "bad_record", "duplicate_record", "missing_file", "not_indexed", "not_queued", "overlap",
         "wrong_queue"), _TIERED,
    ),
}  # fmt: skip
_FILES = {
    "commitlog": "move strays away, take a short or missing segment from a backup or a slave; then {recover}",
    "consumequeue": _QUEUES,
    "batchconsumequeue": _QUEUES,
    "consumequeue_ext": _QUEUES,
    "index": _INDEX,
    "config": _SETTINGS,
    "": "move the file away, then verify again",
}
_DATABASES = {"config": _SETTINGS, "kvStore": _POP_RECORDS}
_CLOSED = "let this user read it (chmod, chown), then verify again: it was not looked at, and a rebuild refuses"
_UNKNOWN = "see the kind in docs/formats.md"


def _lasting(config_file: str) -> str:
    # A pipe, as of a shell's <(...), is gone by then: its place has the name of what it is about.
    is_file = os.path.isfile(config_file) and not os.path.abspath(config_file).startswith(("/dev/", "/proc/"))
    return config_file if is_file else "broker.conf"


def _is_closed(path: str) -> bool:
    # A folder that is listed only does not say what its entries are: the one below it is no more to be had.
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    return not os.access(path, needed, effective_ids=os.access in os.supports_effective_ids)


def _is_below(path: str, folder: str) -> bool:
    return os.path.abspath(path).startswith(os.path.abspath(folder) + os.sep)


class NextSteps:
    """Collects the kinds of findings, and says what to do about each.

    Parameters
    ----------
    path : str
        The store's root.
    options : sequence of str
        What was given as ``-o``; the commands to come need it too.
    config_file : str, optional
    tiered : str, optional
        The folder of tiered storage.
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
        """Note the kind of a finding, and the part of the store that it is about."""
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
            # A rebuild makes units and index files of the local log only.
            step = _TIERED
        self._steps.setdefault(step, set()).add(finding.kind)

    def steps(self) -> list[tuple[str, str]]:
        """list of (str, str): kinds and what to do about them, in the order in which it is done."""
        order = list(_STEPS)
        last = len(order)

        def rank(kinds: set[str]) -> int:
            return min(order.index(kind) if kind in _STEPS else last for kind in kinds)

        rows = sorted(self._steps.items(), key=lambda item: (rank(item[1]), item[0]))
        return [(", ".join(sorted(kinds)), step.format(**self._names)) for step, kinds in rows]
