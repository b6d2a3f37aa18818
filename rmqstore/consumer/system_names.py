"""Which topics and groups are RocketMQ's own: names that every broker makes, and the retry and dead-letter topics of groups.

Owns these names, and nothing else.  Source: `TopicValidator` and `MixAll` (`isSysConsumerGroup`, the constants of groups) of
RocketMQ 5.5.0; the two topics of transactions in RocksDB a broker of that version makes for its own use.
"""

from __future__ import annotations

from rmqstore.message import DLQ_PREFIX, RETRY_PREFIX

__all__ = ["SYSTEM_GROUPS", "SYSTEM_TOPICS", "group_kind", "is_system_group", "is_system_topic", "progress_kind"]

SYSTEM_TOPICS = frozenset(
    """TBW102 SCHEDULE_TOPIC_XXXX SCHEDULE_TOPIC_XXXX_V2 BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC
    RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC OFFSET_MOVED_EVENT
    RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC""".split()
)
SYSTEM_GROUPS = frozenset(
    """DEFAULT_PRODUCER DEFAULT_CONSUMER TOOLS_CONSUMER SCHEDULE_CONSUMER FILTERSRV_CONSUMER __MONITOR_CONSUMER
    CLIENT_INNER_PRODUCER SELF_TEST_P_GROUP SELF_TEST_C_GROUP CID_ONS-HTTP-PROXY CID_ONSAPI_PERMISSION CID_ONSAPI_OWNER
    CID_ONSAPI_PULL""".split()
)
_TOPIC_PREFIX, _GROUP_PREFIX = "rmq_sys_", "CID_RMQ_SYS_"


def is_system_topic(topic: str) -> bool:
    """bool: a broker keeps its own messages in this topic."""
    return topic in SYSTEM_TOPICS or topic.startswith(_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    """bool: a broker or RocketMQ's tools consume as this group."""
    return group in SYSTEM_GROUPS or group.startswith(_GROUP_PREFIX)


def group_kind(group: str) -> str:
    """str: "system" for a group of RocketMQ's own, else ""."""
    return "system" if is_system_group(group) else ""


def progress_kind(group: str, topic: str) -> str:
    """str: what progress of a group in a topic is about: "system" for RocketMQ's own, "retry", "dlq" (dead letters), or ""."""
    if is_system_group(group) or is_system_topic(topic):
        return "system"
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    return "dlq" if topic.startswith(DLQ_PREFIX) else ""
