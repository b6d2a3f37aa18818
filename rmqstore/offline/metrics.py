"""Metrics of a store for Prometheus: families, and the text for a scrape or node_exporter's textfile collector.

Names, labels and meaning of the metrics; the numbers are those of `MessageStore.stats`.  Names that begin with ``rocketmq_`` are
those of rocketmq-exporter and mean the same; what a directory does not contain (clients, rates of the broker's memory) is left
out.  Names that begin with ``rmqstore_`` are ours.  A text of a store only becomes the value of a label, escaped.

Source of the exporter's names, labels and sums: apache/rocketmq-exporter, RMQMetricsCollector and MetricsCollectTask.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from rmqstore.config import StoreConfig
from rmqstore.errors import MissingDependencyError, StoreError
from rmqstore.message import DLQ_PREFIX, RETRY_PREFIX
from rmqstore.offline.pending import Pending, pending
from rmqstore.store.message_store import MessageStore
from rmqstore.store.stats import QueueStats, StoreStats

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

__all__ = ["TOP", "Findings", "collect", "content_type", "names", "text"]

TOP = 1000
"""The default limit on the number of topics, and of pairs of group and topic, with series."""

_K = TypeVar("_K", str, tuple[str, str])

# All metrics, with their help; docs/metrics.md lists the labels.
_HELP = {
    "rocketmq_producer_offset": "Sum of the max offsets of a topic's queues.",
    "rocketmq_topic_retry_offset": "Sum of the max offsets of a retry topic's queues.",
    "rocketmq_topic_dlq_offset": "Sum of the max offsets of a group's dead-letter queues.",
    "rocketmq_consumer_offset": "Sum of a group's offsets in the queues of a topic.",
    "rocketmq_group_diff": "Messages of a topic that a group has not consumed.",
    "rocketmq_group_retrydiff": "Messages of a retry topic that its group has not consumed.",
    "rocketmq_group_get_latency_by_storetime": (
        "Age in ms of the oldest message that a group has not consumed, 0 if there is none."
    ),
    "rocketmq_brokeruntime_commitlog_disk_ratio": "Used part of the commit log's disk, 0 to 1.",
    "rocketmq_brokeruntime_consumequeue_disk_ratio": "Used part of the consume queues' disk, 0 to 1.",
    "rocketmq_brokeruntime_commitlogdir_capacity_total": "Size of the store's disk in bytes.",
    "rocketmq_brokeruntime_commitlogdir_capacity_free": "Free bytes of the store's disk.",
    "rocketmq_brokeruntime_commitlog_maxoffset": "Phy offset of the end of the log.",
    "rocketmq_brokeruntime_commitlog_minoffset": "Phy offset of the oldest segment of the log.",
    "rocketmq_brokeruntime_earliest_message_timestamp": "Store time of the oldest message, ms since the epoch.",
    "rocketmq_brokeruntime_remain_howmanydata_toflush": (
        "Bytes of the log that may not be on disk yet; only if the store is open for writing in this process."
    ),
    "rmqstore_up": "1 if the store can be read, otherwise 0.",
    "rmqstore_clean": "1 if the last shutdown was clean and no writer is running (there is no abort file), otherwise 0.",
    "rmqstore_damaged_files": (
        "Damaged or unreadable files and folders (see rmqstore info); other metrics do not include their content."
    ),
    "rmqstore_files": "Number of files of a part of the store.",
    "rmqstore_size_bytes": "Size of these files in bytes, including unused space.",
    "rmqstore_log_bytes": "Bytes of records in the log.",
    "rmqstore_log_behind_queues_bytes": "Bytes of the log after the last record that is in a queue.",
    "rmqstore_disk_usable_bytes": "Free bytes of the disk, without those reserved for root.",
    "rmqstore_first_store_timestamp_seconds": "Store time of the oldest message, s since the epoch.",
    "rmqstore_last_store_timestamp_seconds": "Store time of the newest message, s since the epoch.",
    "rmqstore_checkpoint_timestamp_seconds": (
        "Store time up to which a part is on disk, according to the checkpoint, s since the epoch."
    ),
    "rmqstore_checkpoint_lag_seconds": "Seconds by which the checkpoint of a part lags the newest message.",
    "rmqstore_left_out": "Topics, and pairs of group and topic, without series because of the limit or the selection of topics.",
    "rmqstore_queues": "Number of consume queues of a topic.",
    "rmqstore_topic_messages": "Messages in the queues of a topic.",
    "rmqstore_topic_last_store_timestamp_seconds": "Store time of the newest message of a topic, s since the epoch.",
    "rmqstore_queue_min_offset": "Queue offset of the first message in the queue.",
    "rmqstore_queue_max_offset": "Queue offset of the next new message.",
    "rmqstore_consumer_queue_offset": "Queue offset that a group consumes next.",
    "rmqstore_consumer_lag_messages": (
        "Messages of a queue that a group has not consumed; no sample if the queue is missing or ends before the offset."
    ),
    "rmqstore_index_files": "Number of index files.",
    "rmqstore_index_entries": "Number of entries in all index files.",
    "rmqstore_index_newest_entries_ratio": "Used part of the newest index file's entries, 0 to 1.",
    "rmqstore_index_newest_slots_ratio": "Used part of the newest index file's slots, 0 to 1.",
    "rmqstore_index_last_store_timestamp_seconds": "Store time of the newest message in the index, s since the epoch.",
    "rmqstore_pending_messages": "Pending messages by kind (delayed, timer, transaction, retry, dlq) and real topic.",
    "rmqstore_pending_overdue_messages": "Pending messages that are overdue.",
    "rmqstore_pending_oldest_timestamp_seconds": "Born time of the oldest pending message, s since the epoch.",
    "rmqstore_pending_first_due_timestamp_seconds": "Due time of the first pending message, s since the epoch.",
    "rmqstore_pending_problems": "Number of unreadable or inconsistent files and records found while reading pending messages.",
    "rmqstore_verify_findings": "Findings of the last verify run, by kind.",
    "rmqstore_verify_timestamp_seconds": "End of the last verify run, s since the epoch.",
}
# The part that each field of the checkpoint covers.
_CHECKPOINT_PARTS = {
    "physic_msg_timestamp": "commitlog",
    "logics_msg_timestamp": "consumequeue",
    "index_msg_timestamp": "index",
}


@dataclass(frozen=True)
class Findings:
    """What a run of `verify` found.

    Attributes
    ----------
    kinds : mapping of str to int
        Number of findings by kind; empty if nothing is wrong.
    timestamp : int
        When the run ended, ms since epoch.
    """

    kinds: Mapping[str, int]
    timestamp: int


def names() -> tuple[str, ...]:
    """tuple of str: the names of all metrics that `collect` can yield."""
    return tuple(_HELP)


def _import_prometheus() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise MissingDependencyError(
            "metrics need the library prometheus-client: install it with 'pip install rmqstore[metrics]'"
        ) from None
    return prometheus_client


def content_type() -> str:
    """str: the content type of `text`, for an HTTP answer."""
    return str(_import_prometheus().CONTENT_TYPE_LATEST)


def _label(value: object) -> str:
    # A lone surrogate (a folder's name that is not UTF-8) has no place in the text; it becomes readable, not lost.
    return str(value).encode("utf-8", "backslashreplace").decode()


_Pairs = tuple[tuple[str, str], ...]


class _Samples:
    """The samples of all families, before they are families: in the order of `_HELP`, and each series once."""

    def __init__(self) -> None:
        self._of: dict[str, dict[_Pairs, float]] = {name: {} for name in _HELP}

    def add(self, name: str, value: float, labels: _Pairs) -> None:
        """One sample, with labels as of `_pairs`."""
        # Names that differ in what cannot be shown would be one series twice, and Prometheus refuses the whole text then.
        self._of[name].setdefault(labels, value)

    def families(self) -> Iterator[GaugeMetricFamily]:
        core = _import_prometheus().core
        for name, samples in self._of.items():
            if samples:
                family = core.GaugeMetricFamily(name, _HELP[name])
                for pairs, value in samples.items():
                    family.add_sample(name, dict(pairs), value)
                yield family


def _pairs(**labels: object) -> _Pairs:
    # A label without a value is left out, which is the same to Prometheus.
    return tuple([(name, _label(value)) for name, value in labels.items() if value != ""])


def collect(
    stores: str | os.PathLike[str] | MessageStore | Sequence[str | os.PathLike[str] | MessageStore],
    config: StoreConfig | None = None,
    *,
    cluster: str = "",
    broker: str = "",
    findings: Findings | None = None,
    with_pending: bool = False,
    topics: Collection[str] | None = None,
    top: int = TOP,
    refresh: bool = True,
) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a store as families of `prometheus_client`, for a collector of a registry.

    Parameters
    ----------
    stores : path, MessageStore, or sequence of them
        Paths are opened read-only.  All series of one among several have the label ``store`` with its path.
    config : StoreConfig, optional
        Of all paths; by default `StoreConfig.infer` of each.
    cluster, broker : str
        Values of the labels of that name; without a value the label is left out.
    findings : Findings, optional
        Of the last `verify`.
    with_pending : bool
        Also what still waits (`rmqstore.pending`), which reads the records that wait, and may scan the log.
    topics : collection of str, optional
        Only these topics have series of their own.
    top : int
        At most this many topics, and pairs of group and topic, have series of their own: those with the largest lag, of topics
        without lag those with most messages.  ``rmqstore_left_out`` counts the others.
    refresh : bool
        Of a read-only `MessageStore`, first pick up what other processes wrote; False where it was just opened or refreshed.

    Yields
    ------
    prometheus_client.core.GaugeMetricFamily
        Those without a sample are left out.

    Raises
    ------
    MissingDependencyError
        prometheus-client is not installed.
    StoreError, OSError
        The store cannot be read.  Of several stores, one that cannot be read has ``rmqstore_up 0`` and no more.
    """
    _import_prometheus()
    samples = _Samples()
    asked: Iterable[Any] = stores if isinstance(stores, Sequence) and not isinstance(stores, str) else (stores,)
    several = asked is stores
    for store in asked:
        path = store.path if isinstance(store, MessageStore) else os.fspath(store)
        labels = {"cluster": cluster, "broker": broker, "store": path if several else ""}
        try:
            stats, store_host = _stats(store, config, refresh)
            waiting = pending(store, config=config) if with_pending else None
        except MissingDependencyError:
            raise
        except (StoreError, OSError):
            if not several:
                raise
            samples.add("rmqstore_up", 0, _pairs(**labels))
            continue
        _add(samples, _bounded(samples, stats, labels, topics, top), store_host, labels, findings)
        if waiting is not None:
            _add_pending(samples, waiting, labels, topics)
    yield from samples.families()


def _stats(
    store: str | os.PathLike[str] | MessageStore, config: StoreConfig | None, refresh: bool
) -> tuple[StoreStats, str]:
    if isinstance(store, MessageStore):
        return store.stats(refresh=refresh), store.config.store_host
    with MessageStore.open(store, config=config, read_only=True) as opened:
        # What was just opened knows what is there: listing the queues once more takes as long as opening.
        return opened.stats(refresh=False), "" if "store_host" in opened.config.assumed else opened.config.store_host


def _bounded(
    samples: _Samples, stats: StoreStats, labels: Mapping[str, str], topics: Collection[str] | None, top: int
) -> StoreStats:
    # The numbers with the queues and the progress that have series of their own; what is left out is a sample.
    pairs = {pair: list(of_pair) for pair, of_pair in groupby(stats.consumers, itemgetter(0, 1))}
    lags = {pair: sum(max(each.lag or 0, 0) for each in consumers) for pair, consumers in pairs.items()}
    weights: dict[str, tuple[int, int]] = {}
    for queue in stats.queues:
        weights[queue.topic] = 0, weights.get(queue.topic, (0, 0))[1] + queue.messages
    for (_, topic), lag in lags.items():
        if topic in weights:
            weights[topic] = max(weights[topic], (lag, weights[topic][1]))
    kept_topics = _greatest(weights, top, lambda topic: topics is None or topic in topics)
    kept_pairs = _greatest(lags, top, lambda pair: topics is None or pair[1] in topics)
    for what, number in (("topics", len(weights) - len(kept_topics)), ("groups", len(lags) - len(kept_pairs))):
        samples.add("rmqstore_left_out", number, _pairs(**labels, of=what))
    return replace(
        stats,
        queues=tuple(each for each in stats.queues if each.topic in kept_topics),
        consumers=tuple(chain.from_iterable(of_pair for pair, of_pair in pairs.items() if pair in kept_pairs)),
    )


def _greatest(weights: Mapping[_K, Any], num: int, wanted: Callable[[_K], bool]) -> set[_K]:
    # The names with the greatest weights, of equal ones the first: they are in order.
    return set(heapq.nlargest(num, filter(wanted, weights), key=weights.__getitem__))


def _add(
    samples: _Samples, stats: StoreStats, store_host: str, labels: Mapping[str, str], findings: Findings | None
) -> None:
    common = _pairs(**labels)

    def store(name: str, value: float | None, **more: object) -> None:
        if value is not None:
            samples.add(name, value, common + _pairs(**more))

    def seconds(name: str, timestamp: int | None, **more: object) -> None:
        # In RocketMQ's files 0 stands for a time that is not known.
        store(name, timestamp / 1000 if timestamp else None, **more)

    runtime = _pairs(**{**{name: value for name, value in labels.items() if name != "broker"}, "brokerIP": store_host})

    def broker(name: str, value: float | None) -> None:
        if value is not None:
            samples.add(f"rocketmq_brokeruntime_{name}", value, runtime)

    broker("commitlog_disk_ratio", stats.disk.used_ratio)
    broker("consumequeue_disk_ratio", stats.disk.used_ratio)
    broker("commitlogdir_capacity_total", stats.disk.total)
    broker("commitlogdir_capacity_free", stats.disk.free)
    broker("commitlog_maxoffset", stats.max_phy_offset)
    broker("commitlog_minoffset", stats.min_phy_offset)
    broker("earliest_message_timestamp", stats.first_store_timestamp)
    broker("remain_howmanydata_toflush", stats.unflushed_size)

    store("rmqstore_up", 1)
    store("rmqstore_clean", int(stats.clean))
    store("rmqstore_damaged_files", stats.damaged_files)
    # Sums over queues that cannot all be read would seem to fall.
    queues_known = not stats.unread_queues and not stats.unseen_folders
    for part, number in stats.files.items():
        if part == "consumequeue" and not queues_known:
            continue
        store("rmqstore_files", number, part=part)
        store("rmqstore_size_bytes", stats.sizes[part], part=part)
    store("rmqstore_log_bytes", stats.max_phy_offset - stats.min_phy_offset)
    if queues_known:
        store("rmqstore_log_behind_queues_bytes", stats.max_phy_offset - stats.dispatched_phy_offset)
    store("rmqstore_disk_usable_bytes", stats.disk.usable)
    seconds("rmqstore_first_store_timestamp_seconds", stats.first_store_timestamp)
    seconds("rmqstore_last_store_timestamp_seconds", stats.last_store_timestamp)
    for field, part in _CHECKPOINT_PARTS.items():
        timestamp = stats.checkpoint[field]
        if timestamp > 0:
            seconds("rmqstore_checkpoint_timestamp_seconds", timestamp, part=part)
            if stats.last_store_timestamp is not None:
                behind = max(stats.last_store_timestamp - timestamp, 0)
                store("rmqstore_checkpoint_lag_seconds", behind / 1000, part=part)
    _add_topics(samples, stats, common)
    _add_consumers(samples, stats, common)
    store("rmqstore_index_files", len(stats.index_files))
    store("rmqstore_index_entries", sum(index.entries for index in stats.index_files))
    if stats.index_files:
        newest = stats.index_files[-1]
        store("rmqstore_index_newest_entries_ratio", newest.entries / max(newest.max_entries, 1))
        store("rmqstore_index_newest_slots_ratio", newest.used_slots / max(newest.slots, 1))
        seconds("rmqstore_index_last_store_timestamp_seconds", max(index.end_timestamp for index in stats.index_files))
    if findings is not None:
        for kind, number in findings.kinds.items():
            store("rmqstore_verify_findings", number, kind=kind)
        if not findings.kinds:
            store("rmqstore_verify_findings", 0)
        seconds("rmqstore_verify_timestamp_seconds", findings.timestamp)


def _add_pending(
    samples: _Samples, waiting: Pending, labels: Mapping[str, str], topics: Collection[str] | None
) -> None:
    for total in waiting.totals:
        if topics is not None and total.topic not in topics:
            continue
        where = _pairs(**labels, kind=total.kind, topic=total.topic or "")
        samples.add("rmqstore_pending_messages", total.messages, where)
        samples.add("rmqstore_pending_oldest_timestamp_seconds", total.first_born_timestamp / 1000, where)
        if total.first_due is not None:
            samples.add("rmqstore_pending_overdue_messages", total.overdue, where)
            samples.add("rmqstore_pending_first_due_timestamp_seconds", total.first_due / 1000, where)
    samples.add("rmqstore_pending_problems", len(waiting.problems), _pairs(**labels))


def _add_topics(samples: _Samples, stats: StoreStats, common: _Pairs) -> None:
    # There may be tens of thousands: the labels of a queue and of a topic are made once for all of their samples.
    add = samples.add
    topics: dict[str, list[QueueStats]] = {}
    for queue in stats.queues:
        topics.setdefault(queue.topic, []).append(queue)
    partly = {topic for topic, _ in stats.unread_queues}
    partly |= {os.path.basename(os.path.dirname(folder)) for folder in stats.unseen_folders}
    for topic, queues in topics.items():
        where = common + _pairs(topic=topic)
        for queue in queues:
            of_queue = (*where, ("queue_id", str(queue.queue_id)))
            add("rmqstore_queue_min_offset", queue.min_queue_offset, of_queue)
            add("rmqstore_queue_max_offset", queue.max_queue_offset, of_queue)
        if topic in partly:
            continue
        total = sum([queue.max_queue_offset for queue in queues])
        if topic.startswith(RETRY_PREFIX):
            add("rocketmq_topic_retry_offset", total, where)
        elif topic.startswith(DLQ_PREFIX):
            add("rocketmq_topic_dlq_offset", total, common + _pairs(group=topic.replace(DLQ_PREFIX, "")))
        else:
            add("rocketmq_producer_offset", total, where)
        add("rmqstore_queues", len(queues), where)
        add("rmqstore_topic_messages", sum([queue.messages for queue in queues]), where)
        times = [queue.last_store_timestamp for queue in queues if queue.last_store_timestamp is not None]
        if times:
            add("rmqstore_topic_last_store_timestamp_seconds", max(times) / 1000, where)


def _add_consumers(samples: _Samples, stats: StoreStats, common: _Pairs) -> None:
    add = samples.add
    only_store = tuple(pair for pair in common if pair[0] == "store")
    for (group, topic), of_pair in groupby(stats.consumers, itemgetter(0, 1)):
        where, consumers = _pairs(group=group, topic=topic), list(of_pair)
        for consumer in consumers:
            of_queue = (*common, *where, ("queue_id", str(consumer.queue_id)))
            if consumer.queue_offset >= 0:
                add("rmqstore_consumer_queue_offset", consumer.queue_offset, of_queue)
            # An offset beyond the end says that units were lost, so how much is left is not known.
            if consumer.lag is not None and consumer.lag >= 0:
                add("rmqstore_consumer_lag_messages", consumer.lag, of_queue)
        if topic.startswith(DLQ_PREFIX):
            continue  # As in the exporter: nobody consumes them.
        diff = "rocketmq_group_retrydiff" if topic.startswith(RETRY_PREFIX) else "rocketmq_group_diff"
        lags = [each.lag for each in consumers if each.lag is not None]
        known = len(lags) == len(consumers)
        if known:
            add(diff, sum(lags), only_store + where)
        add("rocketmq_consumer_offset", sum(max(each.queue_offset, 0) for each in consumers), common + where)
        ages = [
            stats.timestamp - each.next_store_timestamp for each in consumers if each.next_store_timestamp is not None
        ]
        if known:
            add("rocketmq_group_get_latency_by_storetime", max([0, *ages]), common + where)


def text(families: Iterable[GaugeMetricFamily]) -> bytes:
    """bytes: the families of `collect` in Prometheus' text format, to be answered with `content_type`."""
    prometheus = _import_prometheus()

    class Collected:
        def collect(self) -> Iterable[Any]:
            # One family at a time: of many topics each has tens of thousands of samples.
            return families

    return bytes(prometheus.generate_latest(Collected()))
