"""Tables in asv_bench/FIGURES.md and docs/why-not.md, and a plot: ``python -m asv_bench.peers.document [result.json]``.

Owns their text, all of which follows from the result that is kept beside them (docs/peers.json); nobody edits it.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from .. import document
from . import rounds

NAME = "peers"
# Of the tables.
ORDER = ("index", "append", "get", "query", "scan", "rebuild", "recovery", "kv", "spark", "rabbitmq")
RESULT = document.DOCS / "peers.json"
WHY_NOT = document.DOCS / "why-not.md"
PLOT = document.DOCS / "images" / "ratios.svg"
KEY_STORES = "key-stores"
# How docs/why-not.md calls the contenders of the part "kv" that are ours.
OURS = {
    "put_messages, query_message": "rmqstore, messages",
    "put_table, query_table": "rmqstore, Arrow tables",
}


def markdown(result: Mapping[str, Any]) -> str:
    """Return command, machine and tables of each part, a narrow table a work, and the works at which we are slower.

    A part is of one run on one machine; parts may be of different ones, as a ratio is taken within a run.  A machine is named
    once for the parts in a row that ran on it.
    """
    runs = {each["part"]: each["run"] for each in result["results"]}
    lines: list[str] = []
    all_rows = list(rounds.rows(result["results"]))
    last_machine: list[str] = []
    for part in dict.fromkeys(row.part for row in all_rows):
        run = runs[part]
        lines += [
            f"### {part}",
            "",
            *wrapped(
                f"`{run['command']}` on {run['date']}, commit {run['commit']}, {run['rounds']} rounds that count"
                + (f", memory {run['memory']}." if "memory" in run else ".")
            ),
        ]
        machine = wrapped(f"Machine: {described(run['machine'])}; {versions(run['versions'])}.")
        if machine != last_machine:
            lines += machine
            last_machine = machine
        lines.append("")
        for work in dict.fromkeys(row.work for row in all_rows if row.part == part):
            chosen = [row for row in all_rows if row.part == part and row.work == work]
            lines.append(f"| {work}, {chosen[0].unit}/s | rate | lowest – highest | ratio | lowest – highest | goal | |")
            lines.append("|---" * 7 + "|")
            for row in chosen:
                _, who, rate, *rest = rounds.cells(row)
                lines.append("| " + " | ".join([who, rate.removesuffix(f" {row.unit}/s"), *rest]) + " |")
            lines.append("")
    lines += ["### Slower than the peer", ""]
    slower = [row for row in all_rows if row.ours and row.ratio and row.ratio.median < 1]
    lines += [*listed(slower), ""]
    return "\n".join(re.sub(r"(?<=\S)  +", " ", line).rstrip() for line in lines)


def wrapped(text: str, begin: str = "") -> list[str]:
    """A sentence in lines that no document is wider than."""
    return textwrap.wrap(
        text,
        118,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def described(machine: Mapping[str, Any]) -> str:
    """A machine in a few words."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB, {machine['system']}, "
        f"Python {machine['python']}"
    )


def versions(numbers: Mapping[str, str]) -> str:
    """Names and their versions."""
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def key_stores(result: Mapping[str, Any]) -> str:
    """The part beside key stores in one table: who, rate of puts, rate of gets, each with its spread."""
    rates: dict[str, list[str]] = {}
    for row in rounds.rows(each for each in result["results"] if each["part"] == "kv"):
        _, who, rate, spread, *_ = rounds.cells(row)
        rates.setdefault(OURS.get(who, who), []).append(f"{rate} ({spread})")
    run = next(each["run"] for each in result["results"] if each["part"] == "kv")
    machine = run["machine"]
    lines = [
        "| | put, median (lowest – highest) | get, median (lowest – highest) |",
        "|---|---|---|",
        # A loop in C does one of the two, and is no store.
        *(f"| {who} | {' | '.join(both)} |" for who, both in rates.items() if len(both) == 2),
        "",
        f"On {run['date']}, {machine['processor']}, {machine['cores']} cores. How it was measured, and the rest:",
        "[benchmarks](benchmarks.md#next-to-the-peers-in-one-run).",
    ]
    return "\n".join(lines) + "\n"


def listed(chosen: Iterable[rounds.Row]) -> list[str]:
    """Rows as a list, a line a work."""
    by_work: dict[str, list[str]] = {}
    for row in chosen:
        ratio = rounds.digits(row.ratio.median) if row.ratio else "?"
        by_work.setdefault(f"{row.part}, {row.work}", []).append(f"{row.who} ({ratio})")
    lines = [line for work, who in by_work.items() for line in wrapped(f"{work}: {', '.join(who)}", "- ")]
    return lines or ["- nothing"]


# ------------------------------------------------------------------------------------------------------------- the plot

# Of the plot, in pixels: its width, where the texts end and the bars begin, and what a line takes.
WIDTH, LEFT, RIGHT, STEP, TOP = 1000, 400, 750, 17, 46
# The ratios that the scale shows, which is logarithmic.
LOWEST, HIGHEST = 0.5, 40
TICKS = (0.5, 1, 2, 5, 10, 20, 40)


def plot(result: Mapping[str, Any]) -> str:
    """The ratios as an SVG: a line a work, a dot for each of our ways to do it, the peer at 1."""
    chosen: dict[tuple[str, str], list[rounds.Row]] = {}
    peers: dict[tuple[str, str], str] = {}
    for each in result["results"]:
        work = each["part"], each["name"]
        ours = [row for row in rounds.rows([each]) if row.ours and row.ratio]
        if ours:
            chosen[work] = sorted(ours, key=lambda row: row.ratio.median if row.ratio else 0)
            peers[work] = rounds.base_of(each) or ""
    height = TOP + STEP * len(chosen) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        "<title>How many times as fast as the peer, by work</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="14" fill="#333333">times as fast as the peer in the same run (median; logarithmic)</text>',
    ]
    for tick in TICKS:
        x = across(tick)
        parts += [
            f'<line x1="{x}" x2="{x}" y1="{TOP - 12}" y2="{height - 12}" stroke="{"#333333" if tick == 1 else "#dddddd"}"/>',
            f'<text x="{x}" y="{TOP - 16}" text-anchor="middle" fill="#333333">{tick:g}</text>',
        ]
    for number, ((part, name), rows) in enumerate(chosen.items()):
        y = TOP + STEP * number + 4
        low, high = (across(row.ratio.median) for row in (rows[0], rows[-1]) if row.ratio)
        label = f"{part}: {name} ({peers[part, name]})"
        parts += [
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end" fill="#333333">{escape(shortened(label, 60))}</text>',
            f'<line x1="{low}" x2="{high}" y1="{y}" y2="{y}" stroke="#9db4d0" stroke-width="2"/>',
        ]
        for row in rows:
            assert row.ratio is not None
            colour = "#2a5d9f" if row.ratio.median >= 1 else "#c2571a"
            title = escape(f"{row.who}: {rounds.digits(row.ratio.median)}")
            parts.append(
                f'<circle cx="{across(row.ratio.median)}" cy="{y}" r="4" fill="{colour}"><title>{title}</title></circle>'
            )
        best = f"{rounds.digits(rows[-1].ratio.median) if rows[-1].ratio else ''}  {rows[-1].who}"
        parts.append(f'<text x="{RIGHT + 8}" y="{y + 4}" fill="#333333">{escape(shortened(best, 38))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def across(ratio: float) -> float:
    """Where a ratio stands on the scale."""
    held = min(max(ratio, LOWEST), HIGHEST)
    return round(LEFT + (RIGHT - LEFT) * math.log(held / LOWEST) / math.log(HIGHEST / LOWEST), 1)


def shortened(text: str, most: int) -> str:
    """`text` with an ellipsis where it is longer than there is room for."""
    return text if len(text) <= most else text[: most - 1] + "…"


def write_documents(result: Mapping[str, Any]) -> None:
    """Put the tables of `result` into the documents, and the plot beside them."""
    document.write_block(NAME, markdown(result))
    document.write_block(KEY_STORES, key_stores(result), WHY_NOT)
    PLOT.write_text(plot(result), encoding="utf-8")


def write(result: Mapping[str, Any]) -> None:
    """Put the table into the document and the result beside it; parts that were not run stay as they are."""
    run = {name: result[name] for name in ("command", "date", "commit", "rounds", "memory", "machine", "versions")}
    results = [{"run": run, **each} for each in result["results"]]
    if RESULT.exists():
        before = json.loads(RESULT.read_text(encoding="utf-8"))
        kept = [each for each in before["results"] if each["part"] not in {new["part"] for new in results}]
        results = sorted(kept + results, key=lambda each: ORDER.index(each["part"]))
    kept_result = {"results": results}
    RESULT.write_text(json.dumps(kept_result, indent=1) + "\n", encoding="utf-8")
    write_documents(kept_result)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    else:
        write_documents(json.loads(RESULT.read_text(encoding="utf-8")))
