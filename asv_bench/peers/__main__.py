"""The command: run the parts, print the table, keep the result."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import rmqstore

from .. import machine
from . import document, memory, rabbitmq, rounds
from .jvm import JAVA, ROOT, Java, PeerError
from .setting import Setting

PARTS = ("index", "append", "read", "rebuild", "recovery", "kv", "spark", "rabbitmq")
PACKAGES = ("numpy", "pyarrow", "lmdb", "rocksdict", "pyspark", "pika")
console = Console(stderr=True)


def versions() -> dict[str, str]:
    """Those of the peers and libraries that are there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def run_part(part: str, setting: Setting, number: int) -> Iterator[dict[str, Any]]:
    """The results of a part, each printed as soon as it is there."""
    module = importlib.import_module(f"asv_bench.peers.{part}")
    for work in module.works(setting):
        with console.status("") as status:
            result = rounds.run(
                work,
                number,
                lambda done, of, work=work: status.update(f"{work.part}: {work.name}, round {done} of {of}"),
            )
        for row in rounds.rows([result]):
            console.print(
                "  ".join(cell for cell in (part, *rounds.cells(row)) if cell),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        yield result


def print_table(results: list[dict[str, Any]], quick: bool) -> None:
    """The table, one section a part."""
    title = "rmqstore beside its peers (ratio: how many times as fast as the base)"
    table = Table(title=f"{title}; a quick run, the figures mean nothing" if quick else title)
    for title in ("part", *rounds.HEADER):
        table.add_column(title, overflow="fold")
    before = ""
    for row in rounds.rows(results):
        if before and row.part != before:
            table.add_section()
        table.add_row(row.part if row.part != before else "", *map(escape, rounds.cells(row)))
        before = row.part
    Console(width=max(140, console.width)).print(table)


@click.command()
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Only this part (may be given more than once).")
@click.option("--rounds", "number", type=click.IntRange(min=1), help="Rounds that count, 7 by default, 1 with --quick.")
@click.option("--quick", is_flag=True, help="Small data: shows that everything runs, not how fast.")
@click.option(
    "--memory",
    "memory_state",
    type=click.Choice(memory.STATES),
    default="touched",
    show_default=True,
    help="What every timed side finds free: memory touched just before, or memory that the host took back. "
    "A quick run takes it as it is.",
)
@click.option("--scratch", type=click.Path(exists=True, file_okay=False), help="A folder on the disk to measure.")
@click.option("--json", "target", type=click.Path(dir_okay=False), help="Where the result goes.")
@click.option(
    "--document",
    "documented",
    is_flag=True,
    help="Put the tables into asv_bench/FIGURES.md and the plot into docs/images; not with --quick.",
)
def main(
    only: tuple[str, ...],
    number: int | None,
    quick: bool,
    memory_state: str,
    scratch: str | None,
    target: str | None,
    documented: bool,
) -> None:
    """Run rmqstore and its peers alternately on the same generated data; print how they compare."""
    if quick and documented:
        raise click.UsageError("the figures of a quick run mean nothing; leave --quick or --document out")
    memory.state = "as it is" if quick else memory_state
    number = number or (1 if quick else 7)
    parts = [part for part in PARTS if not only or part in only]
    folder = tempfile.mkdtemp(prefix="rmqstore-peers-", dir=scratch)
    java, no_java, started = None, "", time.time()
    try:
        try:
            java = Java(folder)
        except PeerError as error:
            no_java = str(error)
            console.print(f"without Java: {no_java}")
        setting = Setting(folder, quick, java, no_java)
        results = [result for part in parts for result in run_part(part, setting, number)]
    finally:
        if java is not None:
            java.close()
        shutil.rmtree(folder, ignore_errors=True)
    whole = {
        "command": " ".join(
            ["make bench-peers", *([f'PEERS_ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])]
        ),
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started),
        "rounds": number,
        "quick": quick,
        "memory": memory.state,
        "commit": machine.commit(),
        "machine": machine.described(),
        "versions": {
            "rmqstore": rmqstore.__version__,
            **versions(),
            **({"java": java.version, "rocketmq": rocketmq_version()} if java is not None else {}),
            **({"rabbitmq": node} if (node := rabbitmq.version()) is not None else {}),
        },
        "results": results,
    }
    path = Path(target) if target else ROOT / "build" / "peers" / "result.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print_table(results, quick)
    console.print(f"{path}: the result, of {whole['seconds']} s")
    if documented:
        document.write(whole)


def rocketmq_version() -> str:
    """That of the store's jar."""
    return next((JAVA / "lib").glob("rocketmq-store-[0-9]*.jar")).stem.rpartition("-")[2]


if __name__ == "__main__":
    main()
