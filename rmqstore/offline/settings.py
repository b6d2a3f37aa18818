"""settings: read a broker's topics, subscription groups, consumer offsets and pop records as plain values.

Their shapes as JSON are those of ``mqadmin rocksDBConfigToJson`` (RocketMQ 5.5.0): ``dataVersion`` with ``topicConfigTable`` or
``subscriptionGroupTable``; for offsets ``offsetTable`` alone, queue ids as names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rmqstore.commitlog.commit_log import check_store_root
from rmqstore.consumer.settings_sources import SettingsKind, settings_sources, take_settings
from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError, finding_of
from rmqstore.rocksdb.waiting import PopRecord, has_pop_records, pop_records

__all__ = ["Settings", "SourceDescription", "settings"]

_KINDS: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")


@dataclass(frozen=True, slots=True)
class SourceDescription:
    """A place that contains settings.

    `kind` is "topics", "subscription_groups", "consumer_offsets" or "pop_records"; `form` is "json", the layout of a RocksDB
    ("separate", "single", "v2"), or "kvStore".  `counter` and `timestamp` (ms since epoch) are of its data version.  `taken` is
    True if its contents are in the answer.
    """

    kind: str
    form: str
    path: str
    counter: int | None
    timestamp: int | None
    entries: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a broker has when it starts on the directory.

    Attributes
    ----------
    path : str
    topics, subscription_groups : dict of str to dict
        Members by RocketMQ's names, by topic or group.
    forbidden : dict of str to dict of str to int
        The bits of forbidden permissions by group and topic.
    consumer_offsets, pull_offsets : dict of (str, str) to dict of int to int
        By (group, topic) and queue id the queue offset that is consumed, or pulled, next.
    pop_records : tuple of PopRecord
        Delivered messages that were not acknowledged, by the time at which they become visible again.
    data_versions : dict of str to dict of str to int
        ``counter``, ``stateVersion`` and ``timestamp`` of the source that counts, by kind; empty without a source.
    sources : tuple of SourceDescription
        All sources.
    reasons : dict of str to str
        A sentence why one of several sources counts, by kind.
    findings : tuple of Finding
        Unreadable settings.
    """

    path: str
    topics: dict[str, dict[str, Any]]
    subscription_groups: dict[str, dict[str, Any]]
    forbidden: dict[str, dict[str, Any]]
    consumer_offsets: dict[tuple[str, str], dict[int, int]]
    pull_offsets: dict[tuple[str, str], dict[int, int]]
    pop_records: tuple[PopRecord, ...]
    data_versions: dict[str, dict[str, int]]
    sources: tuple[SourceDescription, ...]
    reasons: dict[str, str]
    findings: tuple[Finding, ...]

    def config_json(self, what: str) -> dict[str, Any]:
        """Return one kind in the form of ``mqadmin rocksDBConfigToJson``, wherever it is stored.

        `what` is "topics", "subscriptionGroups" or "consumerOffsets", like that command's ``-t``; ValueError for another.  Pull
        offsets and forbidden permissions, which it does not print, are added in the form of the JSON files.
        """
        if what == "consumerOffsets":
            tables: dict[str, Any] = {"offsetTable": _by_key(self.consumer_offsets)}
            return tables | ({"pullOffsetTable": _by_key(self.pull_offsets)} if self.pull_offsets else {})
        if what == "topics":
            kind, tables = "topics", {"topicConfigTable": self.topics}
        elif what == "subscriptionGroups":
            kind, tables = "subscription_groups", {"subscriptionGroupTable": self.subscription_groups}
            tables |= {"forbiddenTable": self.forbidden} if self.forbidden else {}
        else:
            raise ValueError(f"what is {what!r}; give topics, subscriptionGroups or consumerOffsets")
        version = self.data_versions.get(kind)
        return ({"dataVersion": version} if version else {}) | tables

    def __repr__(self) -> str:
        return (
            f"<Settings {self.path!r}: {len(self.topics)} topics, {len(self.subscription_groups)} groups, offsets of "
            f"{len(self.consumer_offsets)} groups in topics, {len(self.pop_records)} pop records, {len(self.findings)} findings>"
        )


def settings(path: str | os.PathLike[str]) -> Settings:
    """Return the settings of the broker whose store is at `path`; nothing is changed.

    It reads the JSON files of ``config``, its RocksDB databases (three of them, a single one, or that of
    ``configManagerVersion=v2``), and the pop records of ``kvStore``.

    Parameters
    ----------
    path : path
        The store's root (RocketMQ's storePathRootDir).

    Raises
    ------
    MissingDependencyError
        Settings are in RocksDB, and rocksdict is not installed.
    StoreError
        There is no such directory.
    """
    root = check_store_root(path)
    tables: dict[str, dict[str, Any]] = {}
    sources: list[SourceDescription] = []
    findings: list[Finding] = []
    versions: dict[str, dict[str, int]] = {}
    reasons: dict[str, str] = {}
    for kind in _KINDS:
        found = settings_sources(root, kind, quiet=True)
        taken = take_settings(found)
        tables |= taken.tables
        versions[kind] = dict(taken.sources[-1].data_version) if taken.sources else {}
        if taken.reason:
            reasons[kind] = taken.reason
        for source in found:
            findings += source.findings
            counter, timestamp = (source.data_version.get(name) for name in ("counter", "timestamp"))
            is_taken = any(source is each for each in taken.sources)
            sources.append(
                SourceDescription(kind, source.form, source.path, counter, timestamp, source.entries, is_taken)
            )
    records = _pop_records(root, sources, findings)
    topics, groups, forbidden = (
        _sorted(tables.get(name, {})) for name in ("topicConfigTable", "subscriptionGroupTable", "forbiddenTable")
    )
    offsets, pulled = (_by_group(tables.get(name, {})) for name in ("offsetTable", "pullOffsetTable"))
    return Settings(
        root, topics, groups, forbidden, offsets, pulled, records, versions, tuple(sources), reasons, tuple(findings)
    )


def _pop_records(root: str, sources: list[SourceDescription], findings: list[Finding]) -> tuple[PopRecord, ...]:
    if not has_pop_records(root):
        return ()
    path = os.path.join(root, "kvStore")
    records: tuple[PopRecord, ...] = ()
    try:
        records = tuple(pop_records(root, findings))
    except MissingDependencyError:
        raise
    except (StoreError, OSError) as error:
        kind = "damaged_database" if isinstance(error, CorruptionError) else "not_checked"
        findings.append(finding_of(error, kind, path, "pop records are not known: "))
    sources.append(SourceDescription("pop_records", "kvStore", path, None, None, len(records), True))
    return records


def _sorted(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(table[name]) for name in sorted(table)}


def _plain(value: Any) -> Any:
    # Values of plain JSON: the files also have numbers and objects as names, and exact fractions.
    if isinstance(value, dict):
        return {name if isinstance(name, str) else str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(value) if isinstance(value, Decimal) else value


def _by_group(table: Mapping[str, Mapping[int, int]]) -> dict[tuple[str, str], dict[int, int]]:
    # Cut at the first @, which no topic contains.
    cut = {}
    for key, queues in table.items():
        topic, _, group = key.partition("@")
        cut[group, topic] = {queue_id: queues[queue_id] for queue_id in sorted(queues)}
    return {key: cut[key] for key in sorted(cut)}


def _by_key(table: Mapping[tuple[str, str], Mapping[int, int]]) -> dict[str, dict[str, int]]:
    return {
        f"{topic}@{group}": {str(queue_id): offset for queue_id, offset in queues.items()}
        for (group, topic), queues in table.items()
    }
