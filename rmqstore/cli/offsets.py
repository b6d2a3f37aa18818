"""rmqstore offsets: show and set consumer progress.

`set` writes only the file of progress, under the store's lock: all requested queues at once, or none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

import click

from rmqstore.cli.errors import as_usage, did_you_mean
from rmqstore.cli.group import StoreGroup, exit_not_found
from rmqstore.cli.messages import about_queues, about_topic
from rmqstore.cli.options import Given, gathered, path_argument, queues_option, store_options
from rmqstore.cli.paths import complete_group, complete_topic
from rmqstore.cli.terminal import TIME, Printer, escape, note
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.errors import ReadOnlyError
from rmqstore.files.store_lock import StoreLock
from rmqstore.offline.describe import consumer_columns, consumer_places, group_sums, rows_of
from rmqstore.store.message_store import MessageStore

# With more rows only the sums of groups are shown.
_ROWS_SHOWN = 500


class _OffsetsGroup(StoreGroup):
    """A group whose default command is `show`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.list_commands(ctx) and os.path.isdir(args[0]):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_OffsetsGroup)
def offsets() -> None:
    """Show and set the progress of consumer groups.

    `rmqstore offsets PATH` is short for `rmqstore offsets show PATH`.
    """


@offsets.command(name="show")
@path_argument
@click.option("--group", help="Only this consumer group.", shell_complete=complete_group)
@click.option("--topic", help="Only this topic.", shell_complete=complete_topic)
@click.option("--all", "every_queue", is_flag=True, help=f"List every queue, even if there are more than {_ROWS_SHOWN}.")
@store_options
def offsets_show(path: str, group: str | None, topic: str | None, every_queue: bool, given: Given) -> None:
    """Show the progress and lag of consumer groups in every queue, and the sums of each group.

    `waiting since` is the store time of the oldest message that the group has not consumed. `kind` marks RocketMQ's own
    groups and topics: system, retry, and dead letters (dlq). With many queues only the sums are shown, unless --group,
    --topic or --all is given; --json always lists every queue.
    """
    printer = Printer(given.as_json)
    with given.open(path) as store:
        places = consumer_places(store, group, topic)
        columns = consumer_columns(store, places)
        known = [] if places else sorted(store.consumer_offsets.list())
    sums = group_sums(columns)
    if given.as_json:
        for row in rows_of(columns):
            printer.json_line({"type": "progress", **row})
        for each in sums:
            printer.json_line({"type": "group", **each})
    elif places:
        if every_queue or group is not None or topic is not None or len(places) <= _ROWS_SHOWN:
            _print_progress(printer, rows_of(columns))
        else:
            note(f"there are {len(places)} rows; list them with --all, --group or --topic")
        printer.table(
            "sums",
            ("group", "kind", "topics", "queues", "lag", "waiting since"),
            [
                (
                    each["group"], each["kind"], each["topics"], each["queues"], _sum_text(each),
                    printer.time(each["waiting_since"]),
                )
                for each in sums
            ],
            left=2,
            optional="kind",
        )  # fmt: skip
    if not places:
        exit_not_found(_no_progress(known, group, topic))


def _print_progress(printer: Printer, rows: list[dict[str, Any]]) -> None:
    printer.table(
        "consumer progress",
        ("group", "topic", "kind", "queue", "offset", "max offset", "lag"),
        [
            (
                row["group"], row["topic"], row["kind"], str(row["queue_id"]),
                "-" if row["queue_offset"] < 0 else str(row["queue_offset"]),
                "-" if row["max_queue_offset"] is None else str(row["max_queue_offset"]),
                "unknown" if row["lag"] is None else row["lag"],
            )
            for row in rows
        ],
        left=3,
        optional="kind",
    )  # fmt: skip


def _sum_text(each: dict[str, Any]) -> int | str:
    if not each["unknown"]:
        return int(each["lag"])
    return "unknown" if each["unknown"] == each["queues"] else f"{each['lag']} + unknown"


def _no_progress(known: list[tuple[str, str]], group: str | None, topic: str | None) -> str:
    groups = sorted({name for name, _ in known})
    if not known:
        return "the store has no consumer progress"
    if group is not None and group not in groups:
        near = did_you_mean(group, groups) or f"groups with progress: {', '.join(groups[:20])}"
        return f"consumer group {group} has no progress in this store; {near}"
    topics = sorted({name for its_group, name in known if group in (None, its_group)})
    near = did_you_mean(topic or "", topics) or f"topics with progress: {', '.join(topics[:20])}"
    whose = "no consumer group" if group is None else f"consumer group {group}"
    return f"{whose} has {'' if group is None else 'no '}progress in topic {topic}; {near}"


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change of the progress of a group in some queues of a topic."""

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    timestamp: int | None
    earliest: bool
    latest: bool
    queue_offset: int | None

    def place(self, store: MessageStore, queue_id: int) -> int:
        """Return the new queue offset."""
        if self.timestamp is not None:
            return store.offset_by_time(self.topic, queue_id, self.timestamp)
        if self.queue_offset is not None:
            return self.queue_offset
        return (store.min_queue_offset if self.earliest else store.max_queue_offset)(self.topic, queue_id)


@contextlib.contextmanager
def _quiet_about_going_back() -> Iterator[None]:
    # Each change is printed with the offset before it.
    log = logging.getLogger("rmqstore.consumer.consumer_offset")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


@offsets.command(name="set")
@path_argument
@click.option("--group", required=True, help="The consumer group.", shell_complete=complete_group)
@click.option("--topic", required=True, help="The topic.", shell_complete=complete_topic)
@queues_option
@click.option("--time", "timestamp", type=TIME, help="Set to the first message stored at or after this time.")
@click.option("--earliest", is_flag=True, help="Set to the oldest message.")
@click.option("--latest", is_flag=True, help="Set to the end of the queue, after the newest message.")
@click.option("--queue-offset", "queue_offset", type=click.IntRange(min=0, max=2**63 - 1), help="Set to this queue offset.")
@store_options
@gathered(_Change, "change")
def offsets_set(path: str, change: _Change, given: Given) -> None:
    """Set the progress of a group in a topic to an offset, a time, or either end.

    THIS COMMAND WRITES config/consumerOffset.json (with enableLmq, lmqConsumerOffset.json) and keeps the previous file as
    .bak. Stop the broker first: it keeps progress in memory and would overwrite the file. If it is unclear which of the
    two files the broker uses, nothing is written: give -o enableLmq=true or false.
    """
    places = (change.queue_offset is not None, change.timestamp is not None, change.earliest, change.latest)
    if sum(places) != 1:
        raise click.UsageError("give exactly one of --queue-offset, --time, --earliest and --latest")
    group, topic = change.group, change.topic
    printer = Printer(given.as_json)
    config = given.config(path)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(MessageStore.open(path, config=config, read_only=True))
        kept = store.consumer_offsets
        if kept.refusal:
            raise ReadOnlyError(kept.refusal, kept.path)
        stack.enter_context(StoreLock(path))
        progress = ConsumerOffsets.load(kept.path, read_only=False)
        groups = {name for name, _ in progress.list()}
        if group not in groups and did_you_mean(group, groups):
            note(f"note: consumer group {group} has no progress yet; {did_you_mean(group, groups)}")
        known = store.queue_ids(topic)
        chosen = list(dict.fromkeys(change.queue_ids)) or known
        if not chosen:
            exit_not_found(f"the queues of {topic} are unknown; give them with --queue{about_topic(store, topic)}")
        changes = []
        for each in chosen:
            low, high = store.min_queue_offset(topic, each), store.max_queue_offset(topic, each)
            if each not in known:
                note(f"note: topic {topic} has no queue {each}{about_queues(store, topic, [each])}")
            after = change.place(store, each)
            if change.queue_offset is not None and each in known and not low <= after <= high:
                note(f"note: queue {each} of {topic} has queue offsets {low} to {high}; {after} is outside")
            changes.append((each, progress.get(group, topic, each), after))
        # The file cannot contain every name.
        with as_usage(), _quiet_about_going_back():
            for each, _, after in changes:
                progress.commit(group, topic, each, after)
        progress.persist()
    for each, before, after in changes:
        if given.as_json:
            value = {"group": group, "topic": topic, "queue_id": each, "before": before, "queue_offset": after}
            printer.json_line({"type": "progress_set", **value})
        else:
            printer.line(
                f"{escape(group)} in {escape(topic)}/{each}: {after} (before: {before if before >= 0 else 'unknown'})"
            )
