"""Wraps the prose of documents: ``wrap_documents.py FILE.md ...`` (all documents of the project without one).

Owns the width that no line of a document goes over (`WIDTH`); tests/project/test_docs.py holds it.  Paragraphs and items
of lists that have a line over it are filled again.  It never touches a fenced block, a heading or a comment, and no table
but one that has a row over the width: that one becomes a list, an item a row, since a row cannot be wrapped.  What lies
between the comments of a program that writes it (``<!-- name: begin``) stays as it is.  Only spaces and line ends change.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
FENCE = re.compile(r"^ *(`{3,}|~{3,})")
ITEM = re.compile(r"^( *)((?:[-*+]|\d+\.) +)")
ALONE = re.compile(r"^\s*(#|<|\||!!!|\?\?\?|:::|$)")
# A word that would begin something else at the start of a line, with the space before it.
BEGINS = re.compile(r" (?=(?:[-*+#=|]|\d+[.)])(?: |$)|>)")


def filled(words: str, first: str, rest: str) -> list[str]:
    """Words in lines of at most `WIDTH`; code and links are not cut, and no line begins with what would be an item."""
    # Spaces within code and within a link's text stand fast.
    held = re.sub(r"`[^`]*`|\[[^\]\[]*\]\([^)\s]*\)", lambda found: found[0].replace(" ", "\x00"), words)
    # Such a piece may be too long to be held together with what stands beside it; a link's text then may be cut.
    if max(map(len, held.split())) + len(rest) > WIDTH:
        held = re.sub(r"\[[^\]\[]*\]\([^)\s]*\)", lambda found: found[0].replace("\x00", " "), held)
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    lines = wrapper.wrap(BEGINS.sub("\x00", " ".join(held.split())))
    return [line.replace("\x00", " ") for line in lines]


def cells(row: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def listed(rows: list[str]) -> list[str]:
    """A table as a list: each row its first cell, the second in brackets, the third; more are named by the table's head."""
    head, lines = cells(rows[0]), []
    for row in rows[2:]:
        first, *others = cells(row)
        begin = first if first.startswith(("`", "[", "*")) or not first else f"**{first}**"
        if len(others) == 2:
            begin, said = f"{begin} ({others[0]})" if others[0] else begin, others[1]
        else:
            named = [
                f"{name}: {cell}" if name and len(others) > 1 else cell for name, cell in zip(head[1:], others) if cell
            ]
            said = "; ".join(named)
        lines += filled(": ".join(part for part in (begin, said) if part), "- ", "  ")
    return lines


def wrapped(text: str) -> str:
    """The text of a document with its prose wrapped."""
    done: list[str] = []
    block: list[str] = []
    fence = made = ""

    def flush() -> None:
        if block and any(len(line) > WIDTH for line in block):
            item = ITEM.match(block[0])
            first = item[0] if item else re.match(r" *", block[0])[0]  # type: ignore[index]
            rest = " " * len(first) if item else first
            done.extend(filled(" ".join(block)[len(first) :], first, rest))
        else:
            done.extend(block)
        block.clear()

    lines = text.split("\n")
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        mark = FENCE.match(line)
        begun = re.match(r"<!-- ([\w-]+): (begin|end)", line)
        if begun:
            made = begun[1] if begun[2] == "begin" else ""
        if fence or mark or made or begun:
            flush()
            done.append(line)
            if mark:
                fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        elif line.startswith("|"):
            flush()
            rows = [line]
            while number < len(lines) and lines[number].startswith("|"):
                rows.append(lines[number])
                number += 1
            long = any(len(row) > WIDTH for row in rows)
            done.extend(listed(rows) if long and len(rows) > 2 else rows)
        elif ALONE.match(line):
            flush()
            done.append(line)
        else:
            if ITEM.match(line):
                flush()
            block.append(line)
    flush()
    return "\n".join(done)


def documents() -> list[Path]:
    """The documents of the project."""
    folders = [ROOT / name for name in ("docs", "examples", "tests")]
    return sorted(ROOT.glob("*.md")) + [path for folder in folders for path in sorted(folder.rglob("*.md"))]


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or documents():
        before = path.read_text(encoding="utf-8")
        after = wrapped(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path)
