"""Loading of the test data of RabbitMQ: vhost directories that a real 3.10.8 node left, and what it said about them.

Owns the names of the cases.  It never imports rmqstore and never writes below `tests/data`; a vhost is always unpacked
somewhere else.  `tests/data/README.md` says how the data were made.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import golden

DATA = Path(__file__).resolve().parent.parent / "data" / "rabbitmq"


@functools.cache
def cases() -> tuple[str, ...]:
    """Return the names of all cases, in order."""
    return tuple(sorted(path.name for path in DATA.iterdir() if path.is_dir()))


@functools.cache
def manifest(case: str) -> dict[str, Any]:
    """Return what was done in `case` and what must come out; treat it as read-only.

    Sequence ids are given as ranges in texts, which `seqs` reads.
    """
    return json.loads((DATA / case / "manifest.json").read_text(encoding="utf-8"))


def seqs(ranges: list[str]) -> list[int]:
    """Return the sequence ids that ranges such as ``["0-3", "7"]`` name, in the given order."""
    found: list[int] = []
    for text in ranges:
        first, _, last = text.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def published(case: str, queue: str) -> dict[int, dict[str, Any]]:
    """Return {sequence id: {len, sha256_16, persistent, ...}} of all that was published to `queue`."""
    entry = manifest(case)["queues"][queue]
    if "published" in entry:
        return {one["seq"]: one for one in entry["published"]}
    rules = {"b'm%06d' % seq": b"m%06d", "b'd%05d' % seq": b"d%05d"}
    rule = rules[entry["published_summary"]["body_rule"]]
    return {
        seq: {
            "seq": seq,
            "len": len(rule % seq),
            "sha256_16": hashlib.sha256(rule % seq).hexdigest()[:16],
            "persistent": True,
            "body": (rule % seq).decode(),
        }
        for seq in range(entry["published_summary"]["count"])
    }


# The case with 16 MiB files takes 47 MB once it is decompressed; a few of them may stay.
@functools.lru_cache(maxsize=8)
def _tar_bytes(case: str) -> bytes:
    return lzma.decompress((DATA / case / "vhost.tar.xz").read_bytes())


def unpack(case: str, directory: str | os.PathLike[str]) -> Path:
    """Unpack `case` below `directory` and return the path of the vhost's directory (named ``vhost``), all writable."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(_tar_bytes(case)), mode="r:") as archive:
        golden.extract(archive, directory)
    return directory / "vhost"
