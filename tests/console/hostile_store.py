"""A store whose every text is an attack on a page: written with the oracle, since our own code refuses half of it.

Owns the texts, the records and the files.  It never imports rmqstore, so nothing that the package refuses, escapes or repairs
gets between these bytes and the console.  A script that runs sets `window.pwned`; nothing else does.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import oracle

SEGMENT = 16 << 20
GEOMETRY = oracle.geometry(
    mapped_file_size_commit_log=SEGMENT,
    mapped_file_size_consume_queue=2000,
    max_hash_slot_num=50,
    max_index_num=400,
)
OPTIONS = {name: GEOMETRY[name] for name in (
    "mapped_file_size_commit_log", "mapped_file_size_consume_queue", "max_hash_slot_num", "max_index_num"
)}  # fmt: skip
START = 1_767_225_600_000  # 2026-01-01T00:00:00Z, ms

#: What a page must never let through as it is, in a form that can be part of a file name.
SCRIPTS = (
    "<script>window.pwned=1<script>",
    "<img src=x onerror=window.pwned=1>",
    "\"'><svg onload=window.pwned=1>",
    "'-window.pwned=1-'",
    "javascript:window.pwned=1",
    "{{7*7}}${7*7}{%raw%}#{7*7}",
    "&lt;img src=x onerror=window.pwned=1&gt;",
)
#: Characters that change how the rest of a line looks, or that a terminal obeys.
INVISIBLE = (
    "invoice\u202egpj.exe",
    "\u2066isolate\u2069\u200fmark\u200b\u2060\ufeff",
    "\x1b[31mred\x1b]0;title\x07",
    "two\nlines\rand\ttabs",
    "nul\x00inside",
    "c1\x85\x9b31m",
    "line\u2028paragraph\u2029",
    "tag\U000e0041\U000e007f",
)
#: Names that mean something to a file system, a URL, a header or a scripting language.
MEANINGFUL = (
    "..%2f..%2fetc%2fpasswd",
    "..\\..\\windows",
    "a?topic=Other&key=b#fragment",
    "a+b c%20d%00",
    "x%0d%0aSet-Cookie: pwned=1",
    "__proto__",
    "constructor",
    "messages",
    "ünï漢字🙂",
    "T" * 127,
)
#: Only in the log and in the index: no directory can have these names.
WITH_SLASH = (
    "</script><script>window.pwned=1</script>",
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "</title></style></textarea><script>window.pwned=1</script>",
    "//example.org/x",
)


def fits_directory(name: str) -> bool:
    """Tell whether a queue's directory can have this name."""
    return "/" not in name and "\0" not in name and name not in (".", "..") and len(name.encode()) <= 127


TOPICS = tuple(name for name in (*SCRIPTS, *INVISIBLE, *MEANINGFUL) if fits_directory(name))

_PAGE = (
    b"<!doctype html><html><head><title>stolen</title><style>body{display:none}</style></head><body>"
    b"<script>window.pwned=1</script><img src=x onerror=window.pwned=1><iframe srcdoc='<script>parent.pwned=1</script>'>"
    b"</iframe><a href='javascript:window.pwned=1'>click</a><form action=//example.org><input autofocus onfocus=pwned=1>"
    b"</form><meta http-equiv=refresh content='0;url=//example.org'></body></html>"
)
HUGE = 6 << 20
#: Inflates to 48 MiB: more than anyone wants on a page.
_BOMB = zlib.compress(b"<script>window.pwned=1</script>" * (48 * 1024 * 1024 // 31), 9)
_COMPRESSED = 0x1

#: Bodies by a name that is also the key of their message; the number is the record's sysFlag.
BODIES: dict[str, tuple[bytes, int]] = {
    "body-html": (_PAGE, 0),
    "body-huge-html": ((_PAGE * (HUGE // len(_PAGE) + 1))[:HUGE], 0),
    "body-huge-line": (b"A" * (3 << 20), 0),
    "body-empty": (b"", 0),
    "body-json-script": (
        json.dumps({"</script>": "<script>window.pwned=1</script>", "__proto__": {"a": 1}}).encode(),
        0,
    ),
    "body-json-deep": (b"[" * 200_000 + b"]" * 200_000, 0),
    "body-json-deep-objects": (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 0),
    "body-json-long-number": (b'{"n": ' + b"9" * 100_000 + b"}", 0),
    "body-json-exponent": (b'{"n": 1e999999, "m": -1e-999999, "x": NaN, "y": -Infinity}', 0),
    "body-json-surrogate": (b'{"a": "\\ud800", "\\udfff": "\\u202e\\u0000"}', 0),
    "body-json-twice": (b'{"a": 1, "a": 2}', 0),
    "body-json-latin": ('{"a": "ü"}'.encode("latin-1"), 0),
    "body-json-bom": (b"\xef\xbb\xbf{}", 0),
    "body-utf16": ("<script>window.pwned=1</script>".encode("utf-16"), 0),
    "body-utf7": (b"+ADw-script+AD4-window.pwned=1+ADw-/script+AD4-", 0),
    "body-not-text": (bytes(range(256)) * 8, 0),
    "body-control": ("".join(INVISIBLE).encode(), 0),
    "body-surrogates": (b"\xed\xa0\x80\xed\xbf\xbf\xc0\x80\xf4\x90\x80\x80", 0),
    "body-bomb": (_BOMB, _COMPRESSED),
    "body-not-compressed": (b"this is not zlib <script>window.pwned=1</script>", _COMPRESSED),
    "body-half-compressed": (zlib.compress(b"cut off " * 1000)[:20], _COMPRESSED),
    "body-unknown-compression": (b"<script>window.pwned=1</script>", _COMPRESSED | (7 << 8)),
}
#: Numbers that a date, a page or a chart may choke on, as keyword arguments of `oracle.encode_record`.
NUMBERS: dict[str, dict[str, Any]] = {
    "number-born-max": {"born_timestamp": 2**63 - 1},
    "number-born-min": {"born_timestamp": -(2**63)},
    "number-born-negative": {"born_timestamp": -1},
    "number-born-year-10000": {"born_timestamp": 253_402_300_800_000},
    "number-reconsume": {"reconsume_times": -(2**31)},
    "number-flags": {"flag": -1, "sys_flag": 0x7FFFF000},
    "number-prepared": {"prepared_transaction_offset": -(2**63)},
    "number-ipv6": {"born_host": "[fe80::1]:65535", "store_host": "[2001:db8::ffff]:10911"},
}
GROUPS = (*SCRIPTS, *INVISIBLE, *WITH_SLASH, "group@with@at", "")


@dataclass
class HostileStore:
    """Where the store lies, what is in it, and where each named message stands in the log (bytes)."""

    root: Path
    topics: list[str] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    end: int = 0


class _Log:
    def __init__(self, store: HostileStore):
        self.store = store
        self.bytes = bytearray()
        self.queue_offsets: dict[tuple[str, int], int] = {}
        self.dispatcher = oracle.DispatchOracle(GEOMETRY)

    def put(self, name: str, topic: str, body: bytes, properties: list[tuple[str, str | None]], **numbers: Any) -> None:
        queue = topic, numbers.get("queue_id", 0)
        queue_offset = self.queue_offsets.get(queue, 0)
        self.queue_offsets[queue] = queue_offset + 1
        where = len(self.bytes)
        numbers = {"store_timestamp": START + len(self.store.offsets), "born_timestamp": START, **numbers}
        record = oracle.encode_record(
            topic=topic, body=body, properties=properties, queue_offset=queue_offset, phy_offset=where, **numbers
        )
        if where // SEGMENT != (where + len(record) + 8) // SEGMENT:
            # The rest of the segment is a blank record, as a broker leaves it.
            rest = SEGMENT - where % SEGMENT
            self.bytes += rest.to_bytes(4, "big") + oracle.MAGIC_BLANK.to_bytes(4, "big") + bytes(rest - 8)
            self.queue_offsets[queue] = queue_offset
            return self.put(name, topic, body, properties, **numbers)
        self.bytes += record
        self.store.offsets[name] = where
        self.store.sizes[name] = len(record)
        decoded = oracle.decode_record(record, 0, where)
        if fits_directory(topic):
            self.dispatcher.dispatch(decoded)
        else:
            self.dispatcher.index.build(decoded)
        return None


def make(root: Path) -> HostileStore:
    """Write the hostile store below `root`, with an orderly shutdown's files; about 40 MiB, most of it never written."""
    store = HostileStore(root)
    log = _Log(store)
    for name, (body, flags) in BODIES.items():
        log.put(name, "Bodies", body, [("KEYS", name), ("UNIQ_KEY", f"U-{name}")], sys_flag=flags)
    for name, numbers in NUMBERS.items():
        log.put(name, "Numbers", name.encode(), [("KEYS", name)], **numbers)
    for number, topic in enumerate((*TOPICS, *WITH_SLASH)):
        store.topics.append(topic)
        log.put(f"topic-{number}", topic, topic.encode(), [("KEYS", f"topic-{number}"), ("TAGS", topic)])
    # A key ends at a space and a property at \x01 or \x02, so these are as near as a record can come.
    for number, text in enumerate((*SCRIPTS, *INVISIBLE, *MEANINGFUL, *WITH_SLASH)):
        properties = [
            ("KEYS", f"text-{number} {text}"), ("TAGS", text), ("UNIQ_KEY", text), (text, text), ("traceparent", text),
            ("%RETRY%" + text, "x" * 300),
        ]  # fmt: skip
        log.put(f"text-{number}", "Texts", text.encode(), properties, queue_id=number % 3)
    log.put("many-properties", "Texts", b"", [(f"p{n}", f"<b>{n}</b>") for n in range(1500)])
    log.put("long-property", "Texts", b"", [("KEYS", "K" * 16000), ("TAGS", "t" * 16000)])
    log.put("raw-properties", "Texts", b"", [])
    store.end = len(log.bytes)

    for begin in range(0, len(log.bytes), SEGMENT):
        _write(root / "commitlog" / f"{begin:020d}", bytes(log.bytes[begin : begin + SEGMENT]), SEGMENT)
    for name, data in log.dispatcher.files().items():
        folder, _, file = name.rpartition("/")
        if folder == "index":
            # Names that a broker gives: the local time of making.
            file = f"202601010000{int(file):05d}"
        _write(root / folder / file, data, len(data))
    last = START + len(store.offsets) - 1
    _write(root / "checkpoint", oracle.Checkpoint(last, last, last).encode(), 4096)
    offsets = {f"Texts@{group}": {"0": 1, "1": -5, "2": 2**62} for group in GROUPS}
    offsets |= {f"{topic}@G": {"0": 0} for topic in store.topics}
    table = {"dataVersion": {"counter": 1, "stateVersion": 0, "timestamp": START}, "offsetTable": offsets}
    (root / "config").mkdir()
    (root / "config" / "consumerOffset.json").write_text(json.dumps(table), encoding="utf-8")
    return store


def _write(path: Path, data: bytes, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data.rstrip(b"\0"))
        file.truncate(size)
