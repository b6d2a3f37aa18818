"""The tables in docs/performance.md and docs/why-not.md, made of a result: ``python -m asv_bench.peers.document [result.json]``.

Owns its text, all of which follows from the result that is kept beside it (docs/peers.json); nobody edits it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import document
from . import rounds

NAME = "peers"
# Of the tables.
ORDER = ("index", "append", "get", "query", "scan", "rebuild", "recovery", "kv", "spark", "rabbitmq")
RESULT = document.PERFORMANCE.parent / "peers.json"
WHY_NOT = document.PERFORMANCE.parent / "why-not.md"
KEY_STORES = "key-stores"
# How docs/why-not.md calls the contenders of the part "kv" that are ours.
OURS = {
    "put_messages, query_message": "rmqstore, messages",
    "put_table, query_table": "rmqstore, Arrow tables",
}


def markdown(result: Mapping[str, Any]) -> str:
    """Command, machine and table of each part, and what we lose.

    A part is of one run on one machine; parts may be of different ones, as a ratio is taken within a run.
    """
    runs = {each["part"]: each["run"] for each in result["results"]}
    lines: list[str] = []
    all_rows = list(rounds.rows(result["results"]))
    for part in dict.fromkeys(row.part for row in all_rows):
        run = runs[part]
        lines += [
            f"`{run['command']}` on {run['date']}, commit {run['commit']}, {run['rounds']} rounds that count"
            + (f", memory {run['memory']}." if "memory" in run else "."),
            f"Machine: {described(run['machine'])}; {versions(run['versions'])}.",
            "",
        ]
        lines += [f"| {part} | who | rate | lowest – highest | ratio | lowest – highest | goal | |", "|---" * 8 + "|"]
        before = ""
        for row in all_rows:
            if row.part == part:
                work, *rest = rounds.cells(row)
                lines.append("| " + " | ".join([work if work != before else "", *rest]) + " |")
                before = work
        lines.append("")
    lines += [
        f"Slower than the peer: {listed(row for row in all_rows if row.ours and row.ratio and row.ratio.median < 1)}.",
        "",
        f"Goal missed: {listed(row for row in all_rows if rounds.verdict(row) == 'missed')}.",
        "",
    ]
    return "\n".join(line.replace("  ", " ").rstrip() for line in lines)


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
        *(f"| {who} | {' | '.join(both)} |" for who, both in rates.items()),
        "",
        f"On {run['date']}, {machine['processor']}, {machine['cores']} cores. How it was measured, and the rest: "
        "[performance](performance.md#beside-the-peers-in-one-run).",
    ]
    return "\n".join(lines) + "\n"


def write_documents(result: Mapping[str, Any]) -> None:
    """Put the tables of `result` into the documents."""
    document.write_block(NAME, markdown(result))
    document.write_block(KEY_STORES, key_stores(result), WHY_NOT)


def listed(chosen: Iterable[rounds.Row]) -> str:
    """Rows in one sentence, by work."""
    by_work: dict[str, list[str]] = {}
    for row in chosen:
        ratio = rounds.digits(row.ratio.median) if row.ratio else "?"
        by_work.setdefault(f"{row.part}, {row.work}", []).append(f"{row.who} ({ratio})")
    return "; ".join(f"{work}: {', '.join(who)}" for work, who in by_work.items()) or "nothing"


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
