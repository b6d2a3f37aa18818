"""The folder of the commit log, where a broker.conf names it.

Owns the options that move the log out of ``commitlog`` below the store's root.  This package reads no other folder, so that
such an option is refused by its name: without the log every answer is "not there", and every repair a deletion.

Facts (RocketMQ 5.5.0): ``storePathCommitLog`` is ``<storePathRootDir>/commitlog`` by default, and several folders where it has
commas; ``readOnlyCommitLogStorePaths`` names more of them; ``storePathDLedgerCommitLog`` counts with
``enableDLegerCommitLog=true``, and is ``<storePathRootDir>/dledger-<dLegerSelfId>`` by default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rmqstore.config.dledger import is_dledger_name
from rmqstore.errors import UnsupportedFormatError

__all__ = ["refuse_other_log"]

_FOLDERS = ("storePathCommitLog", "readOnlyCommitLogStorePaths")
_DLEDGER = "storePathDLedgerCommitLog"


def refuse_other_log(root: str | os.PathLike[str], options: Mapping[str, str]) -> None:
    """Raise UnsupportedFormatError if the options of a broker.conf place the log elsewhere than in the store at `root`.

    Parameters
    ----------
    options : mapping of str to str
        `StoreConfig.unknown`: RocketMQ's names and values.  Folders below its ``storePathRootDir`` count as those below `root`,
        which may be a copy.
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
