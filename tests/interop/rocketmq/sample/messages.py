"""What is sent to make the sample store: a shop's messages that can be read, laid out as those of `tests/data/rocketmq-broker`.

Owns the words of the sample.  Every message of that store is sent again, with its topic, queue, keys, tags, properties,
unique key and time; in place of a body of mixed letters it has JSON of the same length.  So the records lie where the ones
of the golden store lie, and what documents say of places, times and counts holds for both.  Documents are the exception:
a bill that is packed is much shorter than packed noise, and the catalogue takes up the difference (`Sample.java`).

It reads the golden store, writes one JSON object a line to standard output, and needs nothing but the package itself::

    python messages.py STORE > messages.jsonl
"""

from __future__ import annotations

import base64
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence

from rmqstore import MessageExt, MessageStore

# Name and price in cents; what a customer orders most comes first.
PRODUCTS = (
    ("espresso beans 1 kg", 2190),
    ("filter coffee 500 g", 1190),
    ("porcelain cup", 890),
    ("paper filters", 399),
    ("milk jug 600 ml", 1790),
    ("hand grinder", 7900),
    ("moka pot", 3450),
    ("kitchen scale", 2900),
    ("teapot", 4250),
    ("green tea 100 g", 950),
    ("saucer", 450),
    ("descaler", 790),
)
PLACES = {
    "EU": ("EUR", ("Wien", "Porto", "Berlin", "Athens", "Utrecht", "Helsinki", "Rotterdam", "Thessaloniki")),
    "US": ("USD", ("Reno", "Tulsa", "Boston", "Denver", "Chicago", "Portland", "Milwaukee", "Philadelphia")),
    "CN": ("CNY", ("Xi'an", "Dalian", "杭州", "成都", "Nanjing", "Shenzhen", "Guangzhou", "石家庄")),
    "BR": ("BRL", ("Natal", "Belém", "Recife", "Santos", "Manaus", "Curitiba", "São Paulo", "Florianópolis")),
}
METHODS = ("card", "giro", "cash", "voucher", "invoice", "transfer")
CARRIERS = ("post", "van", "bike", "courier", "parcel post", "pick-up point")
REASONS = ("late", "twice", "sold out", "wrong size", "no payment", "address unknown", "customer's wish")
NOTES = {
    "created": (
        "gift",
        "gift wrap",
        "no bill inside",
        "please grind it",
        "call before you come",
        "leave it at the door",
        "ring twice",
        "the blue ones",
        "side door",
        "third floor",
        "for Friday",
        "as last time",
        "thanks",
    ),
    "paid": (
        "in full",
        "by phone",
        "first half",
        "on account",
        "with a voucher",
        "bill by mail",
        "company card",
        "no receipt",
        "tax free",
        "rounded",
        "thanks",
        "bonus points",
    ),
    "shipped": (
        "fragile",
        "two parcels",
        "this side up",
        "signature needed",
        "left with neighbours",
        "handed over",
        "keep dry",
        "at noon",
        "insured",
        "express",
        "from the second store",
    ),
    "取消": (
        "money back",
        "refund by card",
        "customer called",
        "not in stock",
        "box damaged",
        "found it cheaper",
        "asked twice",
        "no answer",
        "stopped in time",
        "sent back",
        "will reorder",
    ),
}
SHOPS = ("Wien", "Lyon", "Porto", "Boston", "Recife", "Nanjing", "Helsinki")
ENDS = ("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW")


def text_of(fields: Sequence[str], colon: str, comma: str) -> str:
    """A JSON object of fields that are written already, with these for the colon and the comma."""
    return "{" + comma.join(field.replace('":', f'"{colon}', 1) for field in fields) + "}"


def fitted(length: int, choices: Sequence[Sequence[str]]) -> bytes:
    """A JSON object of `length` bytes: of each choice one field, or none where "" is among its fields.

    The fields that come first in a choice are taken first, so put "" last and what may be missing at the end.
    """
    # Of fields of one length the first is as good as any.
    choices = [list({len(field.encode()): field for field in reversed(fields)}.items())[::-1] for fields in choices]
    for colon, comma in ((":", ","), (": ", ", "), (":", ", ")):
        # By the bytes so far: the fields that make them.
        reached: dict[int, tuple[str, ...]] = {0: ()}
        for fields in choices:
            further: dict[int, tuple[str, ...]] = {}
            for size_of_field, field in fields:
                takes = size_of_field + len(colon) - 1 + len(comma) if field else 0
                for size, before in reached.items():
                    if size + takes <= length and size + takes not in further:
                        further[size + takes] = (*before, field) if field else before
            reached = further
        # Two braces, and a comma fewer than fields.
        found = reached.get(length - 2 + len(comma))
        if found:
            body = text_of(found, colon, comma).encode()
            assert len(body) == length and json.loads(body), body
            return body
    raise ValueError(f"no object of {length} bytes of {choices}")


def shuffled(fields: Sequence[str], chooser: random.Random) -> list[str]:
    return chooser.sample(fields, len(fields))


def money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02d}"


class Order:
    """What an order is, the same in all of its messages."""

    def __init__(self, number: int, region: str):
        chooser = random.Random(number)
        self.number, self.region = number, region
        self.currency, cities = PLACES[region]
        self.city = chooser.choice(cities)
        self.customer = f"CUST-{(number - 100000) % 500}"
        things = chooser.sample(PRODUCTS, chooser.choice((1, 1, 2, 3)))
        self.items = [(thing, chooser.choice((1, 1, 2, 2, 3, 4))) for thing in things]
        self.cents = sum(price * quantity for (_, price), quantity in self.items)

    def body(self, event: str, length: int) -> bytes:
        """What a message says when this happens to the order, in so many bytes."""
        chooser = random.Random(f"{self.number} {event}")
        total, key = money(self.cents), f'"order":"ORD-{self.number}"'
        place = [f'"city":"{self.city}"', f'"region":"{self.region}"', ""]
        amount = [f'"total":"{total} {self.currency}"', f'"total":"{total}"', f'"cents":{self.cents}', ""]
        happened = [f'"event":"{event}"', f'"status":"{event}"']
        # How much room there is decides how much is said: things in brackets only where they are whole.
        items = [
            '"items":['
            + ",".join(f'{{"name":"{name}","quantity":{count}}}' for (name, _), count in self.items[:much])
            + "]"
            for much in range(len(self.items), 0, -1)
        ]
        names = [
            '"items":[' + ",".join(f'"{name}"' for (name, _), _ in self.items[:much]) + "]"
            for much in range(len(self.items), 0, -1)
        ]
        own = {
            "created": [
                amount,
                [f'"customer":"{self.customer}"', ""],
                place,
                [*items, *names, f'"pieces":{sum(n for _, n in self.items)}', ""],
            ],
            "paid": [
                amount,
                shuffled([f'"by":"{name}"' for name in METHODS], chooser) + [""],
                [f'"customer":"{self.customer}"', ""],
                place,
                ["", *names],
            ],
            "shipped": [
                shuffled([f'"carrier":"{name}"' for name in CARRIERS], chooser) + [""],
                [f'"tracking":"{self.region}{self.number * 7919 % 10**9:09d}"', ""],
                place,
                [*names, f'"parcels":{1 + len(self.items) // 2}', ""],
            ],
            "取消": [shuffled([f'"reason":"{name}"' for name in REASONS], chooser) + [""], amount, place, [*names, ""]],
        }[event]
        notes = shuffled(NOTES[event], chooser)
        pairs = [f"{one}, {other}" for one, other in itertools.permutations(notes, 2)]
        triples = [", ".join(chooser.sample(notes, 3)) for _ in range(200)]
        long = [", ".join(chooser.sample(notes, much)) for much in (4, 5, 6, 7, 8) for _ in range(100)]
        said = [f'"note":"{text}"' for text in (*notes, *pairs, *triples, *long)]
        plain = [
            f'"{event}":true',
            f'"{event}":"yes"',
            f'"{event}":1',
            f'"is":"{event}"',
            f'"now":"{event}"',
            f'"step":"{event}"',
        ]
        short = ["", '"day":7', '"day":21', '"shop":4', '"till":12', '"via":"web"', '"via":"phone"']
        for choices in (
            [[key], happened, *own, ["", *said]],
            [[key], [*happened, *plain], *own, short, ["", *said]],
        ):
            try:
                return fitted(length, choices)
            except ValueError:
                continue
        raise ValueError(f"ORD-{self.number} {event}: nothing has {length} bytes")


def stock(number: int, length: int) -> bytes:
    """What a shop has of a thing: one message of a batch."""
    chooser = random.Random(f"stock {number}")
    name, price = chooser.choice(PRODUCTS)
    sku = f'"sku":"SKU-{chooser.randrange(1000):04d}"'
    counts = [chooser.randrange(10 ** (digits - 1), 10**digits) for digits in (2, 1, 3, 4)]
    left = [f'"{word}":{count}' for word in ("stock", "in stock", "available") for count in counts]
    shops = [f'"shop":"{shop}"' for shop in shuffled(SHOPS, chooser)]
    more = [f'"name":"{name}"', ""]
    notes = [
        f'"note":"{text}"'
        for text in ("low", "full", "counted", "order more", "shelf 12", "to be counted again", "moved")
    ]
    bins = ["", '"bin":7', '"bin":12', '"row":3', '"rack":4', '"shelf":12']
    return fitted(length, [[sku], left, [*shops, ""], bins, more, [f'"price":"{money(price)}"', ""], ["", *notes]])


def payment(key: str, length: int) -> bytes:
    """A payment that is half of a transaction."""
    number = int(key.partition("-")[2])
    order = Order(100000 + number, "EU")
    by = [f'"by":"{name}"' for name in METHODS]
    sums = [
        f'"total":"{money(order.cents)}"',
        f'"cents":{order.cents}',
        f'"total":{order.cents // 100}',
        f'"euros":"{money(order.cents)}"',
    ]
    return fitted(length, [[f'"order":"ORD-{order.number}"'], sums, [*by, "", '"ok":true', '"final":true']])


def reminder(key: str, length: int) -> bytes:
    """Something to think of later, about an order."""
    number = int(key.partition("-")[2])
    word = "day" if key.startswith("REM") else "try"
    return fitted(length, [[f'"order":"ORD-{100000 + number}"'], [f'"{word}":{number % 7 + 1}']])


def bill(key: str, number: int) -> bytes:
    """A bill for one of the orders, long enough for a producer to pack it."""
    chooser = random.Random(key)
    order = Order(100000 + number * 13 % 2500, chooser.choice(tuple(PLACES)))
    lines, cents = [], 0
    for line in range(chooser.randrange(6, 40)):
        name, price = chooser.choice(PRODUCTS)
        count = chooser.choice((1, 2, 3, 5, 10))
        cents += price * count
        lines.append(
            {"line": line + 1, "name": name, "quantity": count, "price": money(price), "sum": money(price * count)}
        )
    head = {
        "bill": key,
        "order": f"ORD-{order.number}",
        "customer": order.customer,
        "city": order.city,
        "currency": order.currency,
    }
    return json.dumps(head | {"lines": lines, "total": money(cents)}, ensure_ascii=False, indent=1).encode()


def catalogue() -> bytes:
    """All that the shop sells, several times over; as many bytes of it are sent as make the log as long as the golden one."""
    lines = []
    for number in range(12_000):
        name, price = PRODUCTS[number % len(PRODUCTS)]
        lines.append(f'{{"sku":"SKU-{number % 10000:04d}","name":"{name}","price":"{money(price)}"}}')
    return ("[" + ",\n ".join(lines)).encode()


def size_without_body(message: MessageExt) -> int:
    """Bytes of a record of the topic Orders around its body, which may be packed: fixed fields, topic and properties."""
    fixed = 91
    properties = "".join(f"{name}\1{text}\2" for name, text in message.properties.items())
    return fixed + len(message.topic.encode()) + len(properties.encode())


def line_of(message: MessageExt, kind: str, body: bytes, **more: object) -> dict[str, object]:
    """One message as `Sample.java` reads it."""
    kept = {name: text for name, text in message.properties.items() if name in ("region", "trace")}
    return {
        "kind": kind,
        "at": message.born_timestamp,
        "topic": message.properties.get("REAL_TOPIC", message.topic),
        "queueId": int(message.properties.get("REAL_QID", message.queue_id)),
        "keys": message.properties.get("KEYS"),
        "tags": message.tags,
        "uniqueKey": message.unique_key,
        "properties": kept,
        "body": base64.b64encode(body).decode(),
        **more,
    }


def lines(store: MessageStore) -> Iterator[dict[str, object]]:
    """All messages that producers sent, in the order of the log, and none that the broker itself put."""
    orders: dict[int, Order] = {}
    documents = itertools.count()
    stocks = itertools.count()
    for message in store.messages():
        key, length, properties = " ".join(message.keys), len(message.body), message.properties
        if message.topic == "Orders" and "region" in properties:
            number = int(message.keys[0].partition("-")[2])
            order = orders.setdefault(number, Order(number, properties["region"]))
            yield line_of(message, "plain", order.body(message.tags or "", length))
        elif message.topic == "Batches":
            batch = key.rpartition("-")[0]
            yield line_of(message, "batch", stock(next(stocks), length), batch=batch)
        elif message.topic == "Documents":
            yield line_of(message, f"compressed-{message.tags}", bill(key, next(documents)), compress=message.tags)
        elif message.topic == "RMQ_SYS_TRANS_HALF_TOPIC" and "TRANSACTION_CHECK_TIMES" not in properties:
            end = ENDS[int(key.partition("-")[2]) % 3]
            yield line_of(message, f"tx-{end}", payment(key, length), end=end)
        elif message.topic == "SCHEDULE_TOPIC_XXXX" and properties["REAL_TOPIC"] == "Reminders":
            level = int(properties["DELAY"])
            yield line_of(message, "delay-due" if level < 3 else "delay-later", reminder(key, length), delayLevel=level)
        elif message.topic == "rmq_sys_wheel_timer":
            delay = int(properties["TIMER_DELAY_MS"])
            yield line_of(
                message, "timer-due" if delay < 10_000 else "timer-later", reminder(key, length), delayMs=delay
            )
        elif message.topic.startswith("Long_name"):
            yield line_of(message, "long-topic", f'{{"seq":{message.phy_offset // 351 % 90 + 10}}}'.encode())
        elif message.tags == "大":
            # The next record begins where the golden store has it: from there on the layout is the same again.
            end = message.phy_offset + message.store_size
            yield line_of(message, "large", catalogue(), nextPhyOffset=end, around=size_without_body(message))
        elif message.topic == "Orders" and not message.keys:
            yield line_of(message, "tiny", b"0")
        elif message.topic == "Orders":
            yield line_of(message, "colliding-keys", message.body)


if __name__ == "__main__":
    with MessageStore.open(sys.argv[1], read_only=True) as golden_store:
        for each in lines(golden_store):
            print(json.dumps(each, ensure_ascii=False))
