"""Java's turn in a life: RocketMQ's own store opens what our sessions left, says what it finds, puts messages and closes or dies.

Owns the process with the JVM, one for all lives of a simulator, and how a message is put into its words.  It judges nothing:
`life` holds the answers against the model.  The layer is not under it, so no call of Java's fails.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

from peer import JavaStore

from .model import Model, Stored
from .plan import INNER_TOPIC

_java: JavaStore | None = None


def unavailable_reason() -> str | None:
    """Why there is no Java here, or None."""
    return JavaStore.unavailable_reason()


def turn(root: str, model: Model, puts: list[Stored], kill: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Open the store, dump it, put messages, and close it, or kill the process; the dump, and an answer for each put."""
    global _java
    if _java is None:
        _java = JavaStore()
        atexit.register(_java.close)
    preload = os.environ.pop("LD_PRELOAD", None)
    try:
        before, answers, _ = _java.turn(
            root,
            {**model.setting.geometry, **model.setting.options},
            _lines(puts),
            kill=kill,
            batch_topics=[INNER_TOPIC],
        )
    finally:
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload
    return before, answers


def _lines(puts: list[Stored]) -> list[dict[str, Any]]:
    lines = [
        {
            "topic": spec.topic,
            "queueId": spec.queue_id,
            "flag": spec.flag,
            "sysFlag": spec.sys_flag,
            "bornTimestamp": spec.born_timestamp,
            "storeTimestamp": each.timestamp,
            "bornHost": spec.born_host,
            "storeHost": spec.store_host,
            "reconsumeTimes": spec.reconsume_times,
            "preparedTransactionOffset": spec.prepared_transaction_offset,
            "body": spec.body,
            "properties": [list(pair) for pair in spec.pairs],
        }
        for each in puts
        for spec in [each.spec]
    ]
    if not puts[0].in_batch:
        return lines
    # Those of a client's batch have one line.
    inner = [{name: line.pop(name) for name in ("flag", "body", "properties")} for line in lines]
    return [{**lines[0], "batch": inner}]
