"""Loading of the test data of RabbitMQ 4: data directories that real nodes left, and what they delivered afterwards.

Never imports rmqstore and never writes below `tests/data`.  `tests/data/README.md` says how the data were made.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import golden

DATA = Path(__file__).resolve().parent.parent / "data" / "rabbitmq4"


@functools.cache
def _tar_bytes(case: str) -> bytes:
    return lzma.decompress((DATA / case / "db.tar.xz").read_bytes())


def unpack(case: str, directory: Path) -> Path:
    """Unpack `case` below `directory` and return the path of the node's data directory (named ``db``)."""
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(_tar_bytes(case)), mode="r:") as archive:
        golden.extract(archive, directory)
    return directory / "db"


@functools.cache
def delivered(case: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return {(vhost, queue): messages in order}, as the restarted node delivered them; treat it as read-only."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with lzma.open(DATA / case / "truth.jsonl.xz", "rt", encoding="utf-8") as file:
        for line in file:
            value = json.loads(line)
            if "q" in value:
                found.setdefault((value["v"], value["q"]), []).append(value)
    return found
