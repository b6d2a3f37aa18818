"""rmqstore metrics: the metrics of stores in Prometheus's text format; an output file is replaced atomically."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from rmqstore.cli.group import orderly_end
from rmqstore.cli.options import Given, store_options, topics_option
from rmqstore.cli.paths import FILE_THERE, STORE_PATH
from rmqstore.cli.terminal import Printer, escape, note
from rmqstore.errors import StoreError
from rmqstore.files.output_file import OutputFile
from rmqstore.offline.metrics import TOP, Findings, collect, text


@click.command(name="metrics")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=STORE_PATH)
@click.option(
    "-O",
    "--output",
    default="-",
    metavar="FILE",
    help="Replace this file atomically, as node_exporter's textfile collector requires; - is standard output.",
)
@click.option("--cluster", help="Value of the label cluster; by default brokerClusterName in --config.")
@click.option("--broker", help="Value of the label broker; by default brokerName in --config.")
@click.option(
    "--findings",
    "findings_file",
    type=FILE_THERE,
    help="Add the findings in this output of 'rmqstore verify --json'.",
)
@click.option("--pending", "with_pending", is_flag=True, help="Add pending messages; reads them.")
@topics_option
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=TOP,
    show_default=True,
    help="Maximum number of topics, and of pairs of group and topic, with series: those with the largest lag.",
)
@store_options
def metrics_command(
    paths: tuple[str, ...], output: str, cluster: str | None, broker: str | None, findings_file: str | None,
    with_pending: bool, topics: tuple[str, ...], top: int, given: Given,
) -> None:  # fmt: skip
    """Print metrics for Prometheus: queues, consumer lag, disk, index, checkpoint.

    Metrics with the same meaning have the same names as in rocketmq-exporter. With several PATHs each series has the label
    store.
    """
    if findings_file is not None and len(paths) > 1:
        raise click.UsageError("--findings requires a single PATH")
    made = None if output == "-" else OutputFile(output, force=True, outside=paths)
    if made is not None and made.is_link:
        # There is no --force, and the target may be any file.
        raise StoreError("the output is a symbolic link; give the file itself", output)
    if len(paths) > 1 and (given.options or given.config_file is not None):
        raise click.UsageError("-o and --config require a single PATH")
    names = {name: value for name, value, _ in given.broker_conf}
    families = collect(
        paths[0] if len(paths) == 1 else paths,
        given.config(paths[0], read_only=True) if len(paths) == 1 else None,
        cluster=names.get("brokerClusterName", "") if cluster is None else cluster,
        broker=names.get("brokerName", "") if broker is None else broker,
        findings=None if findings_file is None else _findings(findings_file),
        with_pending=with_pending,
        topics=topics or None,
        top=top,
    )
    if made is None and given.as_json:
        printer = Printer(True)
        for sample in (sample for family in families for sample in family.samples):
            printer.json_line({"type": "sample", "name": sample.name, "labels": dict(sample.labels), "value": sample.value})
        return
    found = text(families)
    if made is None and sys.stdout.isatty():
        # Names from a store may contain control characters; Prometheus gets them unchanged.
        for line in found.decode().split("\n")[:-1]:
            click.echo(escape(line))
        return
    if made is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(found)
        return
    with orderly_end(), made as file:
        file.write(found)
        # The collector runs as another user.
        os.fchmod(file.fileno(), 0o644)
    series = sum(1 for line in found.splitlines() if line and not line.startswith(b"#"))
    if given.as_json:
        Printer(True).json_line({"type": "metrics", "output": output, "series": series})
    elif sys.stderr.isatty():
        note(f"{series} series in {output}")


def _findings(path: str) -> Findings:
    summary: Any = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict) and value.get("type") == "summary":
                summary = value
        when = os.fstat(file.fileno()).st_mtime
    kinds = summary.get("kinds") if summary is not None else None
    if not isinstance(kinds, dict) or not all(type(number) is int for number in kinds.values()):
        raise StoreError("this is not the complete output of 'rmqstore verify --json': the summary is missing", path)
    return Findings(kinds, round(when * 1000))
