"""RabbitMQ's message terms: read and made one by one, many as columns, and the terms and tables of a stopped store."""

import numpy as np

from rmqstore.rabbitmq import _term, dets
from rmqstore.rabbitmq.message import Message
from rmqstore.rabbitmq.term import Atom, decode, encode

from . import _data

HEADERS = {"a": 1, "b": "text", "c": [1, 2]}
KINDS = {
    # What the format's document measures: 12 bytes, delivery_mode only; and one with all that a sender may say.
    "12 B": {"body": b"m00000000123", "properties": {"delivery_mode": 2}, "routing_keys": ["qk"]},
    "headers": {
        "body": bytes(200),
        "properties": {
            "content_type": "text/plain",
            "headers": HEADERS,
            "delivery_mode": 2,
            "message_id": "0123456789",
            "timestamp": 1_700_000_000,
        },
        "exchange": "amq.topic",
        "routing_keys": ["some.key"],
    },
}


class OneByOne:
    """One message at a time, 1000 calls."""

    params = [list(KINDS)]
    param_names = ["message"]
    n = 1000

    def setup(self, kind):
        self.arguments = KINDS[kind]
        self.term = Message(**self.arguments).term
        self.value = decode(self.term)

    def time_from_term_body_and_properties(self, kind):
        for _ in range(self.n):
            message = Message.from_term(self.term)
            message.body, message.properties  # noqa: B018

    def time_make(self, kind):
        for _ in range(self.n):
            Message(**self.arguments)

    def time_decode(self, kind):
        for _ in range(self.n):
            decode(self.term)

    def time_encode(self, kind):
        for _ in range(self.n):
            encode(self.value)

    def time_message_id(self, kind):
        for _ in range(self.n):
            _term.message_id_of(self.term)


class Columns:
    """65 536 messages as columns, 8192 a batch; a tenth of it where the benchmarks only have to show that they run."""

    params = [list(KINDS), ["all", "body, keys, exchange"]]
    param_names = ["message", "columns"]
    n = _data.sized(65_536)

    def setup(self, kind, columns):
        term = Message(**KINDS[kind]).term
        self.data = term * self.n
        self.positions = np.arange(self.n, dtype=np.int64) * len(term)
        self.sizes = np.full(self.n, len(term), np.int64)
        self.columns = _term.MESSAGE_COLUMNS if columns == "all" else ("body", "routing_keys", "exchange")

    def time_message_columns(self, kind, columns):
        for first in range(0, self.n, 8192):
            batch = slice(first, first + 8192)
            _term.message_columns(self.data, self.positions[batch], self.sizes[batch], columns=self.columns)


class Recovery:
    """`recovery.dets` of 1000 queues."""

    def setup(self):
        self.objects = [
            (list(b"QUEUE%020d" % i), [(Atom("segments"), [(0, i)]), (Atom("next_seq_id"), i)]) for i in range(1000)
        ]
        self.data = dets.encode(self.objects)

    def time_encode(self):
        dets.encode(self.objects)

    def time_parse(self):
        assert not dets.parse(self.data).problems
