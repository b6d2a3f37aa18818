"""Seeded faults in the package, to measure the simulated runs of a vhost.

Owns what each fault changes, for as long as its context lasts.  Each is one that the package could have had.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from rmqstore.rabbitmq import MessageStore, QueueIndex
from rmqstore.rabbitmq.queue import QueueDirectory

__all__ = ["PLANTED"]

# Functions of the package have the names of these modules.
repairing = importlib.import_module("rmqstore.rabbitmq.repair")
verifying = importlib.import_module("rmqstore.rabbitmq.verify")


def ack_passed_over() -> AbstractContextManager[Any]:
    """The last of several acks is not written."""
    real = QueueIndex.ack

    def ack(self: QueueIndex, seq_ids: Any) -> Any:
        return real(self, seq_ids[:-1] if len(seq_ids) > 1 else seq_ids)

    return mock.patch.object(QueueIndex, "ack", ack)


def removed_too_early() -> AbstractContextManager[Any]:
    """A message goes with its first reference."""
    real = MessageStore.remove_many

    def remove_many(self: MessageStore, msg_ids: Any) -> None:
        listed = list(msg_ids)
        real(self, listed)
        for msg_id in dict.fromkeys(listed):
            while msg_id in self:
                self.remove(msg_id)

    return mock.patch.object(MessageStore, "remove_many", remove_many)


def sync_left_out() -> AbstractContextManager[Any]:
    """A journal is not forced to the disk, and counts as forced."""
    return mock.patch.object(QueueIndex, "sync", lambda self: None)


def damage_unsaid() -> AbstractContextManager[Any]:
    """Damage that may hide a message is missing in `Queue.incomplete`."""
    return mock.patch.object(QueueDirectory, "_hides", lambda self, index, problem: False)


def repair_loses_one() -> AbstractContextManager[Any]:
    """Of the entries of a queue repair leaves out the last."""
    real = repairing._Rows.__iter__

    def rows(self: Any) -> Iterator[Any]:
        found = list(real(self))
        yield from found[:-1] or found

    return mock.patch.object(repairing._Rows, "__iter__", rows)


def verify_blind_to_lost_messages() -> AbstractContextManager[Any]:
    """Verify names no entry that leads to no message."""
    real = verifying.verify_vhost

    def verify_vhost(*args: Any, **kwargs: Any) -> Any:
        return (each for each in real(*args, **kwargs) if each.kind != "lost_message")

    return mock.patch.object(verifying, "verify_vhost", verify_vhost)


PLANTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ack-passed-over": ack_passed_over,
    "removed-too-early": removed_too_early,
    "sync-left-out": sync_left_out,
    "damage-unsaid": damage_unsaid,
    "repair-loses-one": repair_loses_one,
    "verify-blind-to-lost-messages": verify_blind_to_lost_messages,
}
