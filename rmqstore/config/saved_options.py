"""The options that a store was made with, in the file `rmqstore.json` in its root, which a broker ignores.

The file is written before the first segment, so that a program that opens the store without a config continues as it was made.
A broker's store has no such file; its options are inferred from its own files.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from rmqstore.errors import CorruptionError, GeometryError
from rmqstore.files.durable import fsync_directory, write_all
from rmqstore.files.mapped_file import STAGING_PREFIX
from rmqstore.files.open_file import read_small_file
from rmqstore.files.os_errors import is_unreadable, naming_errors

if TYPE_CHECKING:
    from rmqstore.config.store_config import StoreConfig

__all__ = ["OPTIONS_FILE", "SIZES", "load_options", "save_options", "with_saved_options"]

logger = logging.getLogger(__name__)

OPTIONS_FILE = "rmqstore.json"
"""The name of the file, in the root of a store."""
SIZES = frozenset(
    (
        "mapped_file_size_commit_log",
        "mapped_file_size_consume_queue",
        "mapper_file_size_batch_consume_queue",
        "mapped_file_size_consume_queue_ext",
        "max_hash_slot_num",
        "max_index_num",
    )
)
"""The options that files show by their sizes."""
# Options that may differ at each opening: of a process rather than of a store, or shown by its folders.
_OF_A_PROCESS = frozenset(
    (
        "flush_interval_commit_log", "flush_commit_log_least_pages", "flush_commit_log_thorough_interval",
        "flush_interval_consume_queue", "flush_consume_queue_least_pages", "flush_consume_queue_thorough_interval",
        "sync_flush_timeout", "flush_consumer_offset_interval", "consumer_offset_update_version_step", "max_message_size",
        "max_msgs_num_batch", "clean_resource_interval", "delete_file_batch_max", "delete_commit_log_files_interval",
        "store_host", "max_mapped_files", "populate_ahead_size", "enable_lmq", "enable_multi_dispatch",
    )
)  # fmt: skip


def save_options(root: str, config: StoreConfig) -> None:
    """Write the options of the store at `root`; the file is on disk afterwards."""
    # Imported here because few processes make a store.
    import json

    options = {name: value for name, value in config.as_dict().items() if name not in config.assumed}
    text = json.dumps({"format": 1, "options": options}, indent=1)
    # The next opening deletes what a kill leaves of this name.
    path, new = os.path.join(root, OPTIONS_FILE), os.path.join(root, f"{STAGING_PREFIX}options")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with naming_errors(new):
            write_all(fd, text.encode())
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(new, path)
    fsync_directory(root)


def load_options(root: str, cls: type[StoreConfig], *, read_only: bool = False) -> dict[str, Any]:
    """Return the saved options of the store at `root` by name, checked by the class of configs; empty if there are none.

    Raises
    ------
    CorruptionError, OSError
        The file is damaged or cannot be read; with `read_only` that is logged, and it counts as missing.
    """
    try:
        return _parsed(os.path.join(root, OPTIONS_FILE), cls)
    except (CorruptionError, OSError) as error:
        if not read_only or not (isinstance(error, CorruptionError) or is_unreadable(error)):
            raise
        logger.warning("the saved options of the store are not used: %s", error)
        return {}


def _parsed(path: str, cls: type[StoreConfig]) -> dict[str, Any]:
    import json

    text = read_small_file(path)
    if text is None and not os.path.lexists(path):
        return {}
    advice = "restore it, or move it away: the sizes are then inferred from the other files, and other options are defaults"
    try:
        document = json.loads(text or b"")
        if document["format"] != 1:
            raise ValueError(f"format {document['format']!r} is not known")
        options = document["options"]
        known = {name: value for name, value in options.items() if name in cls.__dataclass_fields__}
        config = cls(**known)
        return {name: getattr(config, name) for name in known}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, GeometryError) as error:
        raise CorruptionError(f"the file of the store's options is damaged ({error}); {advice}", path) from None


def with_saved_options(root: str, config: StoreConfig) -> StoreConfig:
    """Return `config` with the saved value of each option that it leaves at its default.

    Raises
    ------
    GeometryError
        Another option, or a size of files, differs from the saved one.
    """
    saved, given, defaults = load_options(root, type(config)), config.as_dict(), type(config)().as_dict()
    differing = [name for name, value in saved.items() if name not in _OF_A_PROCESS and given[name] != value]
    kept = {name: saved[name] for name in differing if name not in SIZES and given[name] == defaults[name]}
    differing = [name for name in differing if name not in kept]
    if differing:
        name, *more = differing
        others = f" (also {', '.join(more)})" if more else ""
        raise GeometryError(
            f"the store was made with {name}={saved[name]!r}, but the config has {given[name]!r}{others}; open it without a "
            "config to continue as it was made, or give reconfigure=True to change it",
            os.path.join(root, OPTIONS_FILE),
        )
    return config.replace(**kept)
