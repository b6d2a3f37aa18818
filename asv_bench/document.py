"""Blocks of a document that a program writes, between two comments that stay: ``<!-- name: begin … -->``, ``<!-- name: end -->``.

Owns the finding and replacing of such a block; everything around it stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
# The page for users, and all figures.
PERFORMANCE = DOCS / "performance.md"
BENCHMARKS = Path(__file__).resolve().with_name("FIGURES.md")


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?P<begin><!-- {re.escape(name)}: begin[^\n]*-->\n)(?P<block>.*?)(?P<end><!-- {re.escape(name)}: end -->)",
        re.S,
    )


def block_of(text: str, name: str) -> str:
    """The block of that name.

    Raises
    ------
    ValueError
        It is not there exactly once.
    """
    found = list(_pattern(name).finditer(text))
    if len(found) != 1:
        raise ValueError(f"the document has {len(found)} blocks named {name!r}, not one")
    return found[0]["block"]


def with_block(text: str, name: str, block: str) -> str:
    """`text` with another block of that name; errors as of `block_of`."""
    block_of(text, name)
    return _pattern(name).sub(lambda match: f"{match['begin']}{block}{match['end']}", text)


def write_block(name: str, block: str, path: Path = BENCHMARKS) -> None:
    """Replace a block of a document."""
    path.write_text(with_block(path.read_text(encoding="utf-8"), name, block), encoding="utf-8")
