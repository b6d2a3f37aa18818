"""The sources of a broker's topics, subscription groups and consumer offsets, and its choice between them.

Owns reading the JSON files and RocksDB databases below ``config`` into one shape, and the choice between several.  It only reads.
An unreadable entry is a finding and hides no other.

The choice of a broker (RocketMQ 5.5.0): with ``storeType=defaultRocksDB`` it takes its database, and merges a JSON file whose data
version has the larger counter at its start: topics and groups are added to those of the database, offsets replace them.  Separate
databases are added to the single one likewise.  With ``configManagerVersion=v2`` it reads nothing else.  A directory does not have
these options: between v2 and the rest the newer one counts.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from rmqstore.config.places import is_named, other_progress_file, progress_file
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.consumer.json_files import load_with_backup, parse_fastjson, refuse_other_kind, table_of, whole_number
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError
from rmqstore.message import DLQ_PREFIX, RETRY_PREFIX
from rmqstore.rocksdb.settings import Kind, Layout, SettingsDatabase, settings_layouts

__all__ = [
    "SettingsKind", "SettingsSource", "TakenSettings", "group_kind", "is_system_topic", "offsets_in_databases",
    "progress_kind", "settings_sources", "take_settings",
]  # fmt: skip

logger = logging.getLogger(__name__)

SettingsKind = Literal["topics", "subscription_groups", "consumer_offsets"]

# For each kind its JSON file, and the names of its tables there and in a database.
_TABLES: dict[str, tuple[str, dict[str, Kind]]] = {
    "topics": ("topics.json", {"topicConfigTable": "topics"}),
    "subscription_groups": (
        "subscriptionGroup.json",
        {"subscriptionGroupTable": "subscription_groups", "forbiddenTable": "forbidden"},
    ),
    "consumer_offsets": (
        "consumerOffset.json",
        {"offsetTable": "consumer_offsets", "pullOffsetTable": "pull_offsets"},
    ),
}
_VERSION_MEMBERS = ("counter", "stateVersion", "timestamp")


@dataclass(slots=True)
class SettingsSource:
    """A source of settings of one kind.

    - `form`: "json", or a layout of `rmqstore.rocksdb.settings`.
    - `data_version`: counter, state version and timestamp (ms since epoch); may be empty.
    - `tables`: by their names in JSON files: ``topicConfigTable``, ``subscriptionGroupTable``, ``forbiddenTable``,
      ``offsetTable`` and ``pullOffsetTable`` (``topic@group`` -> queue id -> offset).
    - `counts`: False for the second file of progress, for brokers with another ``enableLmq``.
    """

    kind: SettingsKind
    form: str
    path: str
    data_version: dict[str, int] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    readable: bool = True
    counts: bool = True

    @property
    def counter(self) -> int:
        """The counter of the data version, 0 without one."""
        return self.data_version.get("counter", 0)

    @property
    def entries(self) -> int:
        """The number of entries in all tables."""
        return sum(map(len, self.tables.values()))


@dataclass(frozen=True, slots=True)
class TakenSettings:
    """The settings of a broker that starts on the directory.

    - `sources`: their sources; later ones take precedence.
    - `reason`: a sentence that explains the choice; "" for a single source.
    """

    tables: dict[str, dict[str, Any]]
    sources: tuple[SettingsSource, ...]
    reason: str


# ---------------------------------------------------------------------------------------------------------- reading


def settings_sources(
    root: str | os.PathLike[str], kind: SettingsKind, *, lmq: bool | None = None, quiet: bool = False
) -> list[SettingsSource]:
    """Return every source of one kind of settings in the store at `root`.

    - `lmq`: selects the JSON file of offsets that counts, see `progress_file`.
    - `quiet`: do not log the `SettingsSource.findings`.
    """
    root = os.fspath(root)
    found = []
    own = next(iter(_TABLES[kind][1].values()))
    for layout in settings_layouts(root, own):
        found.append(_reading(SettingsSource(kind, layout, os.path.join(root, "config")), root))
    of_offsets = kind == "consumer_offsets"
    path = progress_file(root, lmq) if of_offsets else os.path.join(root, "config", _TABLES[kind][0])
    if is_named(path) or is_named(path + ".bak"):
        found.append(_reading(SettingsSource(kind, "json", path), root))
    second = other_progress_file(path) if of_offsets else None
    if second is not None:
        found.append(_reading(SettingsSource(kind, "json", second, counts=False), root))
    for source in [] if quiet else found:
        for finding in source.findings:
            logger.warning("%s: %s", finding.path, finding.detail)
    return found


def _reading(source: SettingsSource, root: str) -> SettingsSource:
    try:
        if source.form == "json":
            _read_json(source)
        else:
            _read_database(source, root)
    except MissingDependencyError:
        raise
    except StoreError as error:
        # Otherwise there is no room to open the database.
        kind = _finding_kind(source) if isinstance(error, CorruptionError) else "not_checked"
        _note_unreadable(source, error.path, error.pos or 0, kind, error.message)
    except OSError as error:
        path = None if error.filename is None else os.fsdecode(error.filename)
        _note_unreadable(source, path, 0, "file", error.strerror or error)
    return source


def _note_unreadable(source: SettingsSource, path: str | None, pos: int, kind: str, problem: object) -> None:
    source.readable = False
    source.path = path or source.path
    source.findings.append(Finding(source.path, pos, kind, f"{source.kind} are not known: {problem}"))


def _read_json(source: SettingsSource) -> None:
    if source.kind == "consumer_offsets":
        offsets = ConsumerOffsets.load(source.path)
        source.tables = {"offsetTable": dict(offsets.offset_table), "pullOffsetTable": dict(offsets.pull_offset_table)}
        for key, offset in offsets.lmq_offset_table.items():
            source.tables["offsetTable"].setdefault(key, {}).setdefault(0, offset)
        source.data_version, source.findings = dict(offsets.data_version), offsets.findings
        source.findings = [*source.findings, *_passed_over(source, offsets.passed_over)]
        source.path = offsets.source or source.path
        return

    def decode(document: Any, path: str) -> None:
        tables: dict[str, dict[str, Any]] = {}
        findings: list[Finding] = []
        refuse_other_kind(document, _TABLES[source.kind][0], path)
        for name in _TABLES[source.kind][1]:
            tables[name] = {}
            for key, value in table_of(document, name, path).items():
                if isinstance(key, str) and isinstance(value, dict):
                    tables[name][key] = value
                else:
                    detail = f"{name}: {key!r} is not an object with a name; the others are read"
                    findings.append(Finding(path, 0, "bad_settings", detail))
        source.data_version = _version(table_of(document, "dataVersion", path), path, findings)
        source.tables, source.findings, source.path = tables, findings, path

    told: list[CorruptionError] = []
    load_with_backup(source.path, True, decode, told)
    source.findings += _passed_over(source, told)


def _passed_over(source: SettingsSource, told: list[CorruptionError]) -> list[Finding]:
    kind = _finding_kind(source)
    return [
        Finding(error.path or source.path, error.pos or 0, kind, f"{source.kind}: {error.message}") for error in told
    ]


def _finding_kind(source: SettingsSource) -> str:
    is_offset_file = source.kind == "consumer_offsets" and source.form == "json"
    return "bad_consumer_offset" if is_offset_file else "bad_settings"


def _version(members: dict[Any, Any], path: str, findings: list[Finding]) -> dict[str, int]:
    try:
        return {
            name: whole_number(members[name], f"dataVersion: {name}", path)
            for name in _VERSION_MEMBERS
            if members.get(name) is not None
        }
    except CorruptionError as error:
        findings.append(Finding(path, 0, "bad_settings", f"{error.message}; it counts as 0"))
        return {}


def _read_database(source: SettingsSource, root: str) -> None:
    layout: Layout = source.form  # type: ignore[assignment]
    kinds = _TABLES[source.kind][1]
    with SettingsDatabase(root, layout, next(iter(kinds.values()))) as database:
        source.path = database.path
        version = database.data_version()
        if isinstance(version, str):
            version = _parsed(version, "the data version", database.path, source.findings)
        source.data_version = _version(version or {}, database.path, source.findings)
        for name, kind in kinds.items():
            # v2 does not keep what is forbidden, v1 no pull offsets.
            kept = layout == "v2" if kind == "pull_offsets" else layout != "v2" if kind == "forbidden" else True
            source.tables[name] = _database_table(database.use(kind), source.findings) if kept else {}
        source.findings += database.findings


def _database_table(database: SettingsDatabase, findings: list[Finding]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    if database.kind in ("consumer_offsets", "pull_offsets") and database.layout == "v2":
        for group, topic, queue_id, offset in database.offsets():
            table.setdefault(f"{topic}@{group}", {})[queue_id] = offset
        return table
    for name, text in database.texts():
        value = _parsed(text, repr(name), database.path, findings)
        if value is None:
            continue
        if database.kind == "consumer_offsets":
            try:
                value = {
                    whole_number(queue_id, f"a queue id of {name!r}", database.path, 32): whole_number(
                        offset, f"the offset of queue {queue_id} of {name!r}", database.path
                    )
                    for queue_id, offset in table_of(value, "offsetTable", database.path).items()
                }
            except CorruptionError as error:
                detail = f"{name!r}: {error.message}; the other groups are read"
                findings.append(Finding(database.path, 0, "bad_settings", detail))
                continue
        table[name] = value
    return table


def _parsed(text: str, what: str, path: str, findings: list[Finding]) -> dict[Any, Any] | None:
    try:
        value = parse_fastjson(text, path)
        if isinstance(value, dict):
            return value
        problem = "no JSON object"
    except CorruptionError as error:
        problem = f"{error.message} at byte {error.pos}"
    findings.append(Finding(path, 0, "bad_settings", f"{what}: its value is {problem}; the others are read"))
    return None


# --------------------------------------------------------------------------------------------------------- choosing


def take_settings(sources: list[SettingsSource]) -> TakenSettings:
    """Return the settings of a broker that starts on a directory with these `sources` of one kind."""
    of = {source.form: source for source in sources if source.readable and source.counts}
    v1 = _named_second(_take_v1(of), sources)
    v2 = of.get("v2")
    if v2 is None:
        return v1
    if not v1.sources:
        return TakenSettings(v2.tables, (v2,), "")
    newest = max(source.data_version.get("timestamp", 0) for source in v1.sources)
    if v2.data_version.get("timestamp", 0) >= newest:
        return TakenSettings(v2.tables, (v2,), f"{_name(v2)} was changed after {_name(v1.sources[-1])}")
    return TakenSettings(v1.tables, v1.sources, f"{_name(v1.sources[-1])} was changed after {_name(v2)}")


def _named_second(taken: TakenSettings, sources: list[SettingsSource]) -> TakenSettings:
    # The broker's option decides between two files of progress, and is not among its settings.
    second = next((source for source in sources if not source.counts), None)
    if second is None or not any(source.form == "json" for source in taken.sources):
        return taken
    text = (
        f"{_name(second)} is not taken, as the other file was written later; a broker with enableLmq=true takes "
        "lmqConsumerOffset.json, any other broker consumerOffset.json"
    )
    return TakenSettings(taken.tables, taken.sources, f"{taken.reason}; {text}" if taken.reason else text)


def _take_v1(of: dict[str, SettingsSource]) -> TakenSettings:
    file = of.get("json")
    base = of.get("single") or of.get("separate")
    if base is None:
        return TakenSettings({} if file is None else file.tables, () if file is None else (file,), "")
    taken, counter, tables, reasons = [base], base.counter, base.tables, []
    others = [file, of["separate"] if base.form == "single" and "separate" in of else None]
    for other in others:
        if other is None:
            continue
        if other.counter > counter:
            replaces = other.form == "json" and other.kind == "consumer_offsets"
            if replaces:
                taken = []
            names = {**tables, **other.tables}
            added = {name: {**tables.get(name, {}), **other.tables.get(name, {})} for name in names}
            tables = other.tables if replaces else added
            taken.append(other)
            reasons.append(
                f"{_name(other)} has data version {other.counter}, {_name(base)} {counter}: a broker "
                f"{'takes the former' if replaces else 'adds the former'}"
            )
            counter = other.counter
        else:
            reasons.append(
                f"{_name(base)} has data version {counter}, {_name(other)} {other.counter}: a broker takes the former"
            )
    return TakenSettings(tables, tuple(taken), "; ".join(reasons))


def _name(source: SettingsSource) -> str:
    folder, name = os.path.split(source.path)
    return f"{os.path.basename(folder)}/{name}"


# --------------------------------------------------------------------------------------------------------- progress


def offsets_in_databases(root: str | os.PathLike[str], lmq: bool | None) -> ConsumerOffsets | None:
    """Return the progress in RocksDB of the store at `root`, read-only; None without a database of offsets.

    If a broker prefers a JSON file to the database, it is the progress in that file (`take_settings`).
    """
    if not settings_layouts(root, "consumer_offsets"):
        return None
    sources = settings_sources(root, "consumer_offsets", lmq=lmq)
    for source in sources:
        if not source.readable and source.form != "json":
            finding = source.findings[-1]
            raise (StoreError if finding.kind == "not_checked" else CorruptionError)(finding.detail, source.path)
    taken = take_settings(sources)
    if taken.reason:
        logger.info("progress of consumer groups: %s", taken.reason)
    path = next(source.path for source in sources if source.form != "json")
    offsets = ConsumerOffsets(path)
    offsets.offset_table = taken.tables.get("offsetTable", {})
    offsets.pull_offset_table = taken.tables.get("pullOffsetTable", {})
    offsets.data_version = dict(taken.sources[-1].data_version)
    offsets.findings = [finding for source in taken.sources for finding in source.findings]
    offsets.source = taken.sources[-1].path
    offsets.refusal = (
        "the progress of this store is in RocksDB, which rmqstore does not write, and a broker ignores a second file of "
        "progress: give offsets=ConsumerOffsets.load(a path of yours, read_only=False)"
    )
    return offsets


# ------------------------------------------------------------------------------------------------------ names of RocketMQ's own

# `TopicValidator` and `MixAll` (`isSysConsumerGroup`, the constants of groups) of RocketMQ 5.5.0; the two topics of transactions in
# RocksDB are a broker's own too.
_SYSTEM_TOPICS = frozenset(
    """TBW102 SCHEDULE_TOPIC_XXXX SCHEDULE_TOPIC_XXXX_V2 BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC
    RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC OFFSET_MOVED_EVENT
    RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC""".split()
)
_SYSTEM_GROUPS = frozenset(
    """DEFAULT_PRODUCER DEFAULT_CONSUMER TOOLS_CONSUMER SCHEDULE_CONSUMER FILTERSRV_CONSUMER __MONITOR_CONSUMER
    CLIENT_INNER_PRODUCER SELF_TEST_P_GROUP SELF_TEST_C_GROUP CID_ONS-HTTP-PROXY CID_ONSAPI_PERMISSION CID_ONSAPI_OWNER
    CID_ONSAPI_PULL""".split()
)
_TOPIC_PREFIX, _GROUP_PREFIX = "rmq_sys_", "CID_RMQ_SYS_"


def is_system_topic(topic: str) -> bool:
    """Return True if a broker keeps its own messages in this topic."""
    return topic in _SYSTEM_TOPICS or topic.startswith(_TOPIC_PREFIX)


def group_kind(group: str) -> str:
    """Return "system" for a group of a broker or RocketMQ's tools, else ""."""
    return "system" if group in _SYSTEM_GROUPS or group.startswith(_GROUP_PREFIX) else ""


def progress_kind(group: str, topic: str) -> str:
    """Return the kind of a group's progress in a topic: "system" for RocketMQ's own, "retry", "dlq" (dead letters), or ""."""
    if group_kind(group) or is_system_topic(topic):
        return "system"
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    return "dlq" if topic.startswith(DLQ_PREFIX) else ""
