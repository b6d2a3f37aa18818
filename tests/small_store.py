"""Small stores that commands are tried on, their geometry and their files: no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 2000,
    "max_hash_slot_num": 20,
    "max_index_num": 80,
}


def options_of(geometry: dict[str, Any]) -> list[str]:
    """The same for a command: ``-o NAME=VALUE`` for each."""
    return [word for name, value in geometry.items() for word in ("-o", f"{name}={value}")]


def tree_bytes(path: Path) -> dict[str, bytes | None]:
    """The content of every file below `path`, by its place there, and None for each folder."""
    return {
        str(each.relative_to(path)): None if each.is_dir() else each.read_bytes() for each in sorted(path.rglob("*"))
    }
