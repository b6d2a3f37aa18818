"""rmqstore offsets: consumer progress, shown and set.

`set` writes the file of progress alone, under the lock of the store: all queues that were asked for at once, or none.
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
from rmqstore.cli.group import StoreGroup, nothing
from rmqstore.cli.messages import about_queues, about_topic
from rmqstore.cli.options import Given, gathered, path_argument, queues_option, store_options
from rmqstore.cli.paths import complete_group, complete_topic
from rmqstore.cli.terminal import TIME, Printer, escape, note
from rmqstore.consumer.consumer_offset import ConsumerOffsets
from rmqstore.errors import ReadOnlyError
from rmqstore.files.store_lock import StoreLock
from rmqstore.offline.describe import consumer_columns, consumer_places, group_sums, rows_of
from rmqstore.store.message_store import MessageStore

# Of more rows the sums of each group are shown alone.
_ROWS_SHOWN = 500


class _OffsetsGroup(StoreGroup):
    """Takes a path in place of a command for what `show` shows."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.list_commands(ctx) and os.path.isdir(args[0]):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_OffsetsGroup)
def offsets() -> None:
    """Progress of consumer groups: what is next for each, and its lag.

    `rmqstore offsets PATH` is `rmqstore offsets show PATH`.
    """


@offsets.command(name="show")
@path_argument
@click.option("--group", help="Only this consumer group.", shell_complete=complete_group)
@click.option("--topic", help="Only this topic.", shell_complete=complete_topic)
@click.option("--all", "every_queue", is_flag=True, help=f"Every queue, also of more than {_ROWS_SHOWN}.")
@store_options
def offsets_show(path: str, group: str | None, topic: str | None, every_queue: bool, given: Given) -> None:
    """Show the progress of every group, its lag in every queue, and the sum of each group.

    `waiting since` is when the oldest message was stored that is next for the group. `kind` marks what is RocketMQ's
    own: system groups and topics, retry topics, and those of dead letters (dlq). Of many queues the table has the sums
    alone, unless --group, --topic or --all is given; --json always has every queue.
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
            note(f"there are {len(places)} queues of groups; --all lists each, --group and --topic those of one")
        # Nobody waits for the lag of RocketMQ's own groups.
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
        nothing(_no_progress(known, group, topic))


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
    return "unknown" if each["unknown"] == each["queues"] else f"{each['lag']} and unknown"


def _no_progress(known: list[tuple[str, str]], group: str | None, topic: str | None) -> str:
    groups = sorted({name for name, _ in known})
    if not known:
        return "no consumer group has progress in this store"
    if group is not None and group not in groups:
        near = did_you_mean(group, groups) or f"groups that have any: {', '.join(groups[:20])}"
        return f"consumer group {group} has no progress in this store; {near}"
    topics = sorted({name for its_group, name in known if group in (None, its_group)})
    near = did_you_mean(topic or "", topics) or f"there is some in: {', '.join(topics[:20])}"
    whose = "no consumer group" if group is None else f"consumer group {group}"
    return f"{whose} has {'' if group is None else 'no '}progress in topic {topic}; {near}"


@dataclasses.dataclass(frozen=True)
class _Change:
    """Whose progress is set, in which queues, and to what."""

    group: str
    topic: str
    queue_ids: tuple[int, ...]
    timestamp: int | None
    earliest: bool
    latest: bool
    queue_offset: int | None

    def place(self, store: MessageStore, queue_id: int) -> int:
        """Return the queue offset that is next after the change."""
        if self.timestamp is not None:
            return store.offset_by_time(self.topic, queue_id, self.timestamp)
        if self.queue_offset is not None:
            return self.queue_offset
        return (store.min_queue_offset if self.earliest else store.max_queue_offset)(self.topic, queue_id)


@contextlib.contextmanager
def _quiet_about_going_back() -> Iterator[None]:
    # Going back is what was asked for; each change is shown with what was before.
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
@click.option("--time", "timestamp", type=TIME, help="The first message stored at or after this time.")
@click.option("--earliest", is_flag=True, help="The oldest message that is there.")
@click.option("--latest", is_flag=True, help="After the newest message.")
@click.option("--queue-offset", "queue_offset", type=click.IntRange(min=0, max=2**63 - 1), help="This queue offset.")
@store_options
@gathered(_Change, "change")
def offsets_set(path: str, change: _Change, given: Given) -> None:
    """Set the progress of a group in a topic to an offset, a time, or an end.

    THIS COMMAND WRITES config/consumerOffset.json, or lmqConsumerOffset.json with enableLmq (the one before stays as
    .bak), and nothing else. The broker must not run: it keeps progress in memory and would overwrite the file. Where the
    store does not tell which of the two files the broker uses, nothing is written: give -o enableLmq=true or false.
    """
    places = (change.queue_offset is not None, change.timestamp is not None, change.earliest, change.latest)
    if sum(places) != 1:
        raise click.UsageError("give one of --queue-offset, --time, --earliest and --latest")
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
            nothing(f"which queues {topic} has is not known; give them with --queue{about_topic(store, topic)}")
        changes = []
        for each in chosen:
            low, high = store.min_queue_offset(topic, each), store.max_queue_offset(topic, each)
            if each not in known:
                note(f"note: the store has no queue {each} of {topic}{about_queues(store, topic, [each])}")
            after = change.place(store, each)
            if change.queue_offset is not None and each in known and not low <= after <= high:
                note(f"note: queue {each} of {topic} holds the queue offsets {low} to {high}, and not {after}")
            changes.append((each, progress.get(group, topic, each), after))
        # A name that the file cannot hold is wrong usage.
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
