"""What is wrong in checkpoint and settings of a store, as findings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rmqstore.errors import CorruptionError, Finding, MissingDependencyError, StoreError, finding_of
from rmqstore.files.checkpoint import Checkpoint
from rmqstore.files.os_errors import is_unreadable
from rmqstore.message import SCHEDULE_TOPIC
from rmqstore.offline.compared import Compared
from rmqstore.offline.verify_unread import unread_database, unread_file

if TYPE_CHECKING:
    from rmqstore.consumer.settings_sources import SettingsKind

__all__ = ["checkpoint_findings", "settings_findings"]


def checkpoint_findings(compared: Compared, end: int, last_timestamp: int) -> Iterator[Finding]:
    """Compare the checkpoint with a log that ends at `end`, and whose newest record was stored at `last_timestamp`."""
    path = os.path.join(compared.root, "checkpoint")
    try:
        checkpoint = Checkpoint.load(path, read_only=True)
    except (StoreError, OSError) as error:
        if is_unreadable(error):
            yield unread_file(path, error, "its times and offsets are not compared with the log")
        else:
            yield Finding(path, 0, "bad_checkpoint", str(error))
        return
    newest = max(last_timestamp, 0)
    if compared.commit_log.min_offset > 0 or compared.unread:
        # Where the clock was set back, what retention deleted may have been stored later than all that is left; so
        # may what cannot be read.
        newest = max(newest, compared.config.clock())
    for pos, name in (
        (0, "physic_msg_timestamp"),
        (8, "logics_msg_timestamp"),
        (16, "index_msg_timestamp"),
    ):
        value = getattr(checkpoint, name)
        if value < 0 or value > newest:
            yield Finding(
                path,
                pos,
                "bad_checkpoint",
                f"{name} is {value}, but the newest record was stored at {last_timestamp}; a recovery that trusts it "
                "skips what it should look at",
            )
    for pos, name in ((32, "confirm_phy_offset"), (40, "logics_physical_offset")):
        value = getattr(checkpoint, name)
        if value < 0 or value > end:
            yield Finding(path, pos, "bad_checkpoint", f"{name} is {value}, the log ends at {end}")


def _delay_offsets(compared: Compared, queues_known: bool) -> Iterator[Finding]:
    # It brings NumPy along.
    from rmqstore.offline.pending_queues import check_delay_offsets

    path = os.path.join(compared.root, "config", "delayOffset.json")
    try:
        offsets, problems = check_delay_offsets(compared.root)
        for problem in problems:
            yield finding_of(problem, "bad_settings", path)
        for level, offset in sorted(offsets.items()):
            end = _end_of_queue(compared, SCHEDULE_TOPIC, level - 1) if queues_known else 0
            if 0 < end < offset:
                text = (
                    f"delayOffset.json: the offset {offset} of level {level} is after the end of its queue, {end}: a broker "
                    "goes on at the end, and delivers none of the messages before it"
                )
                yield Finding(path, 0, "bad_settings", text)
    except CorruptionError as error:
        yield finding_of(error, "bad_settings", path)
    except OSError as error:
        where = path if error.filename is None else os.fsdecode(error.filename)
        yield Finding(where, 0, "file", f"progress of delay levels is not known: {error.strerror or error}")


def _end_of_queue(compared: Compared, topic: str, queue_id: int) -> int:
    # 0 where there is none, or it was not looked at or cannot be read, which is said elsewhere.
    with contextlib.suppress(StoreError, OSError):
        look = compared.queues.look(topic, queue_id, compared.commit_log.min_offset)
        return 0 if look is None else look.max_queue_offset
    return 0


def settings_findings(compared: Compared, queues_known: bool) -> Iterator[Finding]:
    """Check the settings of a store.

    Parameters
    ----------
    queues_known : bool
        The files of queues say where queues end.
    """
    from rmqstore.consumer.settings_sources import settings_sources
    from rmqstore.rocksdb.waiting import has_pop_records, pop_records

    kinds: tuple[SettingsKind, ...] = ("topics", "subscription_groups", "consumer_offsets")
    for kind in kinds:
        path = os.path.join(compared.root, "config")
        try:
            for source in settings_sources(compared.root, kind, quiet=True):
                yield from source.findings
        except (StoreError, OSError) as error:
            yield Finding(path, 0, "not_checked", f"{kind}: {error}")
    yield from _delay_offsets(compared, queues_known)
    if has_pop_records(compared.root):
        path = os.path.join(compared.root, "kvStore")
        findings: list[Finding] = []
        try:
            for _ in pop_records(compared.root, findings):
                pass
        except MissingDependencyError as error:
            findings.append(Finding(path, 0, "not_checked", f"pop records: {error.message}"))
        except CorruptionError as error:
            findings.append(Finding(path, 0, "damaged_database", f"pop records: {error.message}"))
        except (StoreError, OSError) as error:
            findings.append(unread_database(path, error, "pop records"))
        yield from findings
