"""The options that a store was made with, in the file `rmqstore.json` in its root, which a broker ignores.

The file is written before the first segment, so that a program that opens the store without a config continues as it was made.
A broker's store has no such file; its options are inferred from its own files.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from rmqstore.errors import CorruptionError, GeometryError
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import is_unreadable

if TYPE_CHECKING:
    from rmqstore.config.store_config import StoreConfig

__all__ = ["OPTIONS_FILE", "check_options", "load_options", "save_options"]

logger = logging.getLogger(__name__)

OPTIONS_FILE = "rmqstore.json"
"""The name of the file, in the root of a store."""
# Options of a process rather than of a store: they may differ at each opening.
_OF_A_PROCESS = frozenset(
    (
        "flush_interval_commit_log", "flush_commit_log_least_pages", "flush_commit_log_thorough_interval",
        "flush_interval_consume_queue", "flush_consume_queue_least_pages", "flush_consume_queue_thorough_interval",
        "sync_flush_timeout", "flush_consumer_offset_interval", "consumer_offset_update_version_step", "max_message_size",
        "max_msgs_num_batch", "clean_resource_interval", "delete_file_batch_max", "delete_commit_log_files_interval",
        "store_host", "max_mapped_files", "populate_ahead_size",
    )
)  # fmt: skip


def save_options(root: str, config: StoreConfig) -> None:
    """Write the options of the store at `root`; the file is on disk afterwards."""
    # Imported here because few processes make a store.
    import json

    from rmqstore.files.output_file import OutputFile

    text = json.dumps({"format": 1, "options": config.as_dict()}, indent=1, ensure_ascii=False)
    with OutputFile(os.path.join(root, OPTIONS_FILE), force=True) as file:
        file.write(text.encode("utf-8", "surrogatepass"))


def load_options(root: str, *, read_only: bool = False) -> dict[str, Any]:
    """Return the saved options of the store at `root` by name, empty if there are none.

    Raises
    ------
    CorruptionError, OSError
        The file is damaged or cannot be read; with `read_only` that is logged, and it counts as missing.
    """
    try:
        return _parsed(os.path.join(root, OPTIONS_FILE))
    except (CorruptionError, OSError) as error:
        if not read_only or not (isinstance(error, CorruptionError) or is_unreadable(error)):
            raise
        logger.warning("the saved options of the store are not used: %s", error)
        return {}


def _parsed(path: str) -> dict[str, Any]:
    import json

    from rmqstore.config.store_config import StoreConfig

    text = read_small_file(path)
    if text is None:
        return {}
    advice = "restore it, or move it away: the sizes are then inferred from the other files, and other options are defaults"
    try:
        options = json.loads(text)["options"]
        known = {name: value for name, value in options.items() if name in StoreConfig.__dataclass_fields__}
        return StoreConfig(**known).as_dict()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, GeometryError) as error:
        raise CorruptionError(f"the file of the store's options is damaged ({error}); {advice}", path) from None


def check_options(root: str, config: StoreConfig) -> None:
    """Raise GeometryError if `config` contradicts the saved options of the store at `root`."""
    saved, given = load_options(root), config.as_dict()
    differing = [name for name, value in saved.items() if name not in _OF_A_PROCESS and given[name] != value]
    if differing:
        name, *more = differing
        others = f" (also {', '.join(more)})" if more else ""
        raise GeometryError(
            f"the store was made with {name}={saved[name]!r}, but the config has {given[name]!r}{others}; open it without a "
            "config to continue as it was made, or give reconfigure=True to change it",
            os.path.join(root, OPTIONS_FILE),
        )
