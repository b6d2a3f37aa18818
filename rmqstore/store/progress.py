"""The progress of consumer groups that a store keeps: the file is read when somebody asks for it.

Owns which file, or database, it is and when it is read again; what is in it belongs to `rmqstore.consumer`.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from rmqstore.config import StoreConfig
from rmqstore.config.places import other_progress_file, progress_file
from rmqstore.errors import StoreError

if TYPE_CHECKING:
    # Imported where it is used, as few programs use it.
    from rmqstore.consumer.consumer_offset import ConsumerOffsets

__all__ = ["GroupProgress"]

logger = logging.getLogger(__name__)


class GroupProgress:
    """Where the groups of one store stand."""

    def __init__(self, path: str, config: StoreConfig, *, read_only: bool):
        self.path = path
        self.config = config
        self.read_only = read_only
        self._offsets: ConsumerOffsets | None = None
        # What was logged last.
        self._said = ""
        self._pid = os.getpid()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Make the lock new, in a forked child."""
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Read the file again when it is next asked for."""
        with self._lock:
            self._offsets = None

    @property
    def offsets(self) -> ConsumerOffsets:
        """ConsumerOffsets: read when it is first asked for, see `MessageStore.consumer_offsets`."""
        with self._lock:
            if self._offsets is None:
                from rmqstore.consumer.settings_sources import offsets_in_databases

                # In doubt the file that was written last is read, and none is written.
                lmq = None if "enable_lmq" in self.config.assumed else self.config.enable_lmq
                self._offsets = offsets_in_databases(self.path, lmq) or self._of_file(lmq)
            return self._offsets

    def _of_file(self, lmq: bool | None) -> ConsumerOffsets:
        from rmqstore.consumer.consumer_offset import ConsumerOffsets

        path = progress_file(self.path, lmq)
        offsets = ConsumerOffsets.load(
            path,
            read_only=self.read_only or self._pid != os.getpid() or lmq is None,
            version_step=self.config.consumer_offset_update_version_step,
            clock=self.config.clock,
        )
        if lmq is None:
            offsets.refusal = (
                "the file of progress that the broker uses is not known: with enableLmq=true it is lmqConsumerOffset.json, "
                "else consumerOffset.json, and the store does not tell; give enable_lmq=True or False (-o enableLmq=true or "
                "-o enableLmq=false), as the broker has it"
            )
        second = other_progress_file(path)
        if second is not None:
            offsets.not_read = second
            reason = "the other one was written later" if lmq is None else f"enable_lmq is {lmq}"
            self._warn(
                f"{second} is not read: a broker uses one of two files of progress, and {reason}; change that with enable_lmq"
            )
        return offsets

    def _warn(self, text: str) -> None:
        # Each refresh reads the file again.
        if self._said != text:
            logger.warning("%s", text)
            self._said = text

    def list(self) -> tuple[dict[tuple[str, str], dict[int, int]], str | None]:
        """What `offsets` lists and why it cannot be read, see `MessageStore.consumer_progress`."""
        try:
            offsets = self.offsets
            findings = offsets.findings
            problem = f"{findings[0].detail} [{findings[0].path}]" if findings else None
            if problem is not None and len(findings) > 1:
                problem += f", and {len(findings) - 1} more"
            return offsets.list(), problem
        except (StoreError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                text = f"{error.strerror} [{os.fsdecode(error.filename)}]"
            self._warn(f"the progress of consumer groups is not known: {text}")
            return {}, text

    def persist(self) -> None:
        """Write what was committed since, if anybody asked for the offsets."""
        offsets = self._offsets
        if offsets is not None and not offsets.read_only:
            offsets.persist()
