"""Which directories are of RabbitMQ 4.x, whose nodes ignore what this package writes.

Owns the signs, from the surest to the weakest.  It only reads.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from rmqstore.errors import StoreError
from rmqstore.files.listing import listing
from rmqstore.files.open_file import read_small_file
from rmqstore.rabbitmq.definitions import data_directory
from rmqstore.rabbitmq.ets import clean_dot_values
from rmqstore.rabbitmq.index_directory import IndexEntry
from rmqstore.rabbitmq.node import store_path

if TYPE_CHECKING:
    from rmqstore.rabbitmq.vhost import Vhost

__all__ = ["sign_of_version_4"]


def sign_of_version_4(vhost: Vhost) -> str | None:
    """Return what shows that RabbitMQ 4.x wrote a vhost's directory; None for one of 3.x."""
    node = data_directory(vhost.path)
    if any(name.endswith(".sqs") for name in listing(store_path(vhost.path, True)).names):
        return "message files that end in .sqs"
    if any({"redeliver_seq_id", "delivery_count"} & each.keys() for each in vhost.terms.values()):
        return "recovery terms as 4.3 writes them"
    if (
        node is not None
        and os.path.isdir(os.path.join(node, "coordination"))
        and not os.path.lexists(os.path.join(node, "schema.DAT"))
    ):
        return "no Mnesia tables: the node keeps its queues in Khepri"
    stubs = [each.queue_name.index_version if each.queue_name else 1 for each in vhost.directories]
    if any(each.has_version_1 and version == 1 for each, version in zip(vhost.directories, stubs, strict=True)):
        return None
    stop = _clean_stop(vhost)
    if stop:
        return None if "index_module" in stop else "a clean.dot as 4.x writes it"
    if 2 in stubs or any(each.index_version == 2 for each in vhost.directories):
        forms = set(map(partial(_form, vhost), chain.from_iterable(each.entries() for each in vhost.directories)))
        return None if forms - {None} == {"basic_message"} else "queues of version 2, and no sign of 3.x"
    return None


def _clean_stop(vhost: Vhost) -> dict[str, Any]:
    path = os.path.join(store_path(vhost.path, True), "clean.dot")
    try:
        return clean_dot_values(read_small_file(path) or b"", path=path)
    except (StoreError, OSError):
        return {}


def _form(vhost: Vhost, entry: IndexEntry) -> str | None:
    try:
        found = vhost.message_of(entry)
    except OSError:
        return None
    return None if found is None else found[0].form
