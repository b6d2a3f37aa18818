"""rmqstore offsets: consumer progress, shown and set."""

from __future__ import annotations

import click

from rmqstore.cli.group import nothing
from rmqstore.cli.options import Given, path_argument, store_options
from rmqstore.cli.terminal import TIME, Printer, escape
from rmqstore.consumer_offset import ConsumerOffsets
from rmqstore.message_store import MessageStore
from rmqstore.store_lock import StoreLock


@click.group()
def offsets() -> None:
    """Progress of consumer groups: what is next for each, and how far behind it is."""


@offsets.command(name="show")
@path_argument
@click.option("--group", help="Only this consumer group.")
@click.option("--topic", help="Only this topic.")
@store_options
def offsets_show(path: str, group: str | None, topic: str | None, given: Given) -> None:
    """Show the progress of every group."""
    printer = Printer(given.as_json)
    found = 0
    with MessageStore.open(path, config=given.config(path), read_only=True) as store:
        table = store.consumer_offsets.list()
        if not given.as_json and table:
            printer.line(
                f"{'group':<24}  {'topic':<24}  {'queue':>5}  {'offset':>12}  {'max offset':>12}  {'behind':>10}"
            )
        for (name, its_topic), queues in sorted(table.items()):
            if group not in (None, name) or topic not in (None, its_topic):
                continue
            for queue_id, queue_offset in sorted(queues.items()):
                found += 1
                newest = store.max_queue_offset(its_topic, queue_id)
                behind = max(newest - queue_offset, 0)
                if given.as_json:
                    printer.json_line(
                        {
                            "type": "progress", "group": name, "topic": its_topic, "queue_id": queue_id,
                            "queue_offset": queue_offset, "max_queue_offset": newest, "behind": behind,
                        }
                    )  # fmt: skip
                else:
                    printer.line(
                        f"{escape(name):<24}  {escape(its_topic):<24}  {queue_id:>5}  {queue_offset:>12}  {newest:>12}  "
                        f"{behind:>10}"
                    )
    if not found:
        nothing("no progress is known")


@offsets.command(name="set")
@path_argument
@click.option("--group", required=True, help="The consumer group.")
@click.option("--topic", required=True, help="The topic.")
@click.option(
    "--queue", "queue_id", type=click.IntRange(min=0), multiple=True, help="A queue; repeatable, by default all."
)
@click.option("--to", "queue_offset", type=click.IntRange(min=0), help="This queue offset.")
@click.option("--time", "timestamp", type=TIME, help="The first message stored at or after this time.")
@click.option("--earliest", is_flag=True, help="The oldest message that is there.")
@click.option("--latest", is_flag=True, help="Behind the newest message.")
@store_options
def offsets_set(
    path: str,
    group: str,
    topic: str,
    queue_id: tuple[int, ...],
    queue_offset: int | None,
    timestamp: int | None,
    earliest: bool,
    latest: bool,
    given: Given,
) -> None:
    """Set the progress of a group in a topic, or reset it by time.

    THIS COMMAND WRITES config/consumerOffset.json (the one before stays as .bak) and nothing else. The broker must not
    run: it keeps progress in memory and would overwrite the file.
    """
    ways = [queue_offset is not None, timestamp is not None, earliest, latest]
    if sum(ways) != 1:
        raise click.UsageError("give one of --to, --time, --earliest and --latest")
    printer = Printer(given.as_json)
    config = given.config(path)
    with MessageStore.open(path, config=config, read_only=True) as store, StoreLock(path):
        progress = ConsumerOffsets.load(store.consumer_offsets.path, read_only=False)
        for each in queue_id or store.queue_ids(topic):
            before = progress.get(group, topic, each)
            if timestamp is not None:
                after = store.offset_by_time(topic, each, timestamp)
            elif queue_offset is not None:
                after = queue_offset
            else:
                after = store.min_queue_offset(topic, each) if earliest else store.max_queue_offset(topic, each)
            progress.commit(group, topic, each, after)
            if given.as_json:
                printer.json_line(
                    {
                        "type": "progress_set",
                        "group": group,
                        "topic": topic,
                        "queue_id": each,
                        "before": before,
                        "queue_offset": after,
                    }
                )
            else:
                printer.line(
                    f"{escape(group)} in {escape(topic)}/{each}: {after} (before: {before if before >= 0 else 'unknown'})"
                )
        if not (queue_id or store.queue_ids(topic)):
            nothing(f"topic {escape(topic)} has no queues; name them with --queue")
        progress.persist()
