"""The places of a broker's log and of the progress of consumer groups.

Owns the options that move the log out of ``commitlog`` below the store's root; they are refused, as without the log every repair
is a deletion.  Owns the names of DLedger's folders, which are not read, and of the two files of progress.

Facts (RocketMQ 5.5.0): ``storePathCommitLog`` is ``<storePathRootDir>/commitlog`` by default, and several folders if it has
commas; ``readOnlyCommitLogStorePaths`` names more of them.  With ``enableDLegerCommitLog=true`` (DLedger 0.3.1) the log is in
``dledger-<dLegerSelfId>/data`` below storePathRootDir, or ``storePathDLedgerCommitLog``, with an index of its entries in
``index``; each record has a header of 48 bytes before it.  A ``commitlog`` folder has older records; the phy offsets continue from
its end. A broker with ``enableLmq=true`` keeps all groups in ``config/lmqConsumerOffset.json``, any other in
``config/consumerOffset.json``. Neither reads the other file, which stays after the option is changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rmqstore.errors import UnsupportedFormatError
from rmqstore.files.listing import listing

__all__ = [
    "dledger_folders", "is_dledger_name", "is_named", "other_progress_file", "progress_file", "refuse_dledger", "refuse_other_log",
    "without_log",
]  # fmt: skip

_FOLDERS = ("storePathCommitLog", "readOnlyCommitLogStorePaths")
_DLEDGER = "storePathDLedgerCommitLog"


def refuse_other_log(root: str | os.PathLike[str], options: Mapping[str, str]) -> None:
    """Raise UnsupportedFormatError if the options of a broker.conf place the log outside of the store at `root`.

    - `options`: RocketMQ's names and values, see `StoreConfig.unknown`.  Folders below its ``storePathRootDir`` count as those
      below `root`, which may be a copy.
    """
    own = os.path.join(os.fspath(root), "commitlog")
    roots = {os.path.abspath(root)}
    if options.get("storePathRootDir", "").strip():
        roots.add(_normal(options["storePathRootDir"]))
    for name in _FOLDERS:
        for folder in _folders(options, name):
            if not _is_same(folder, own) and _normal(folder) not in {os.path.join(each, "commitlog") for each in roots}:
                raise UnsupportedFormatError(
                    f"{name} places the commit log in another folder, which this package does not read. Make {own} a link to "
                    "it; of several folders, make it a folder with a link to each segment. Leave the option out of the "
                    f"broker.conf where {own} has all of the log",
                    folder,
                )
    if options.get("enableDLegerCommitLog", "").strip().lower() == "false":
        return
    for folder in _folders(options, _DLEDGER):
        above, name = os.path.split(_normal(folder))
        if above not in roots or not is_dledger_name(name):
            raise UnsupportedFormatError(
                f"{_DLEDGER} places the commit log in a folder of DLedger's, which this package does not read. Give "
                "enableDLegerCommitLog=false in the broker.conf where the broker does not use it",
                folder,
            )


def _folders(options: Mapping[str, str], name: str) -> list[str]:
    return [each.strip() for each in options.get(name, "").split(",") if each.strip()]


def _normal(folder: str) -> str:
    return os.path.abspath(folder.strip())


def _is_same(folder: str, own: str) -> bool:
    try:
        return os.path.samefile(folder, own)
    except OSError:
        return False


def is_dledger_name(name: str) -> bool:
    """Return True if DLedger's folder below a store's root may have this name."""
    return name.startswith("dledger-")


def dledger_folders(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the folders of DLedger in the store at `root` that contain anything, sorted."""
    # The opening of the store reports an unreadable directory.
    folders = [entry.path for entry in listing(root) if is_dledger_name(entry.name)]
    parts = ("data", "index")
    return tuple(each for each in folders if any(_holds_anything(os.path.join(each, part)) for part in parts))


def _holds_anything(folder: str) -> bool:
    found = listing(folder)
    return bool(found) or isinstance(found.error, PermissionError)


def without_log(root: str) -> None:
    """Raise UnsupportedFormatError if the store at `root`, which has no segment, has a commit log of DLedger."""
    for folder in dledger_folders(root):
        raise UnsupportedFormatError(
            "the commit log of this store is DLedger's (enableDLegerCommitLog=true), which this package does not read; "
            "rmqstore settings shows its topics and groups",
            folder,
        )


def refuse_dledger(root: str) -> None:
    """Raise UnsupportedFormatError if the log of the store at `root` is, or continues as, DLedger's: it must not be written."""
    for folder in dledger_folders(root):
        raise UnsupportedFormatError(
            "the commit log of this store is DLedger's, or goes on there (enableDLegerCommitLog=true): queues and index "
            "lead to messages that this package does not see, and would be cut. A commitlog folder next to it "
            "can be read (read_only=True). If no broker uses this folder any longer, move it away",
            folder,
        )


_PLAIN, _LMQ = "consumerOffset.json", "lmqConsumerOffset.json"


def progress_file(root: str | os.PathLike[str], lmq: bool | None = None) -> str:
    """Return the path of the file for the progress of consumer groups, which may be missing.

    - `lmq`: the broker's ``enableLmq``; None: the newer file.
    """
    plain, light = (os.path.join(root, "config", name) for name in (_PLAIN, _LMQ))
    if lmq is None:
        lmq = _written(light) > _written(plain)
    return light if lmq else plain


def other_progress_file(path: str) -> str | None:
    """Return the path of the second file of progress next to the one at `path`, None if there is none."""
    folder, name = os.path.split(path)
    other = os.path.join(folder, _PLAIN if name == _LMQ else _LMQ)
    return other if os.path.lexists(other) or os.path.lexists(other + ".bak") else None


def is_named(path: str) -> bool:
    """Return True if `path` exists, also as a broken symlink, or is unreadable: reading it raises the error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _written(path: str) -> int:
    # A broker that was killed may have left the backup alone.
    for name in (path, path + ".bak"):
        try:
            return os.stat(name).st_mtime_ns
        except OSError:
            continue
    return -1
