"""The possible states of a directory after a power loss, replayed from the log of a child.

Owns the model of a file system that promises what POSIX does and nothing more: bytes are on disk when an `fsync`,
`fdatasync` or `msync` that began after they were written has returned, a name when its directory was forced after the
name was given.  Of all else each page may be as it was at any time since it was last forced, and each change of a
directory may have happened or not, whatever was changed before or after it.  Files are known by inode, so that a name
that was changed takes its bytes along.  It knows nothing of stores.
"""

from __future__ import annotations

import dataclasses
import os
import random

from faults import IS_DIRECTORY, IS_NEW, Call

Entries = dict[str, "File | Folder"]


@dataclasses.dataclass(eq=False, slots=True)
class File:
    """`forced` are the bytes that are surely there (None: nothing is sure), `now` those that readers saw at the end."""

    forced: bytes | None = None
    now: bytes = b""
    #: Stretches that were forced, (clock when it began, clock when it was done, offset, bytes), offset -1: the whole file.
    forcings: list[tuple[int, int, int, bytes]] = dataclasses.field(default_factory=list)
    #: What mappings held: (clock, offset, bytes).
    photos: list[tuple[int, int, bytes]] = dataclasses.field(default_factory=list)
    #: For each stretch the clock before which nothing of it can be on disk any more.
    marks: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def settle(self) -> None:
        """Apply what was forced, in the order of the beginnings."""
        for begin, _, offset, data in sorted(self.forcings, key=lambda each: each[0]):
            if offset < 0:
                self.forced = data
                self.marks.append((begin, 0, len(data)))
            else:
                held = (self.forced or b"").ljust(offset + len(data), b"\0")
                self.forced = held[:offset] + data + held[offset + len(data) :]
                self.marks.append((begin, offset, offset + len(data)))

    def after_loss(self, dice: random.Random, loss: float, page: int) -> bytes:
        """The bytes with each page, by the dice, as it was at the last forcing or at some time since."""
        forced = b"" if self.forced is None else self.forced
        size = len(self.now)
        if len(forced) != size and dice.random() < max(loss, 0.3):
            size = len(forced)
        now, forced = self.now[:size].ljust(size, b"\0"), forced[:size].ljust(size, b"\0")
        pieces = []
        for at in range(0, size, page):
            end = min(at + page, size)
            if dice.random() >= loss:
                pieces.append(now[at:end])
            elif self.photos and dice.random() < 0.3:
                pieces.append(self._photo(dice, at, end, forced[at:end]))
            else:
                pieces.append(forced[at:end])
        return b"".join(pieces)

    def _photo(self, dice: random.Random, begin: int, end: int, otherwise: bytes) -> bytes:
        since = max((clock for clock, low, high in self.marks if low < end and high > begin), default=0)
        found = [
            data[begin - offset : end - offset]
            for clock, offset, data in self.photos
            if clock > since and offset <= begin and offset + len(data) >= end
        ]
        return dice.choice(found) if found else otherwise


@dataclasses.dataclass(eq=False, slots=True)
class Folder:
    entries: Entries = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False, slots=True)
class Change:
    """Names that were taken and given together; sure when the folder of `gives` was forced, else that of `takes`."""

    takes: tuple[Folder, str] | None
    gives: tuple[Folder, str, File | Folder] | None
    end: int
    sure: bool = False

    def apply(self, tree: dict[Folder, Entries]) -> None:
        if self.gives is not None and isinstance(tree.get(self.gives[0], {}).get(self.gives[1]), Folder):
            return  # No system puts a name in the place of a folder that was not moved away.
        if self.takes is not None:
            tree.setdefault(self.takes[0], {}).pop(self.takes[1], None)
        if self.gives is not None:
            tree.setdefault(self.gives[0], {})[self.gives[1]] = self.gives[2]

    def __str__(self) -> str:
        taken = "" if self.takes is None else f"-{self.takes[1]} "
        return taken + ("" if self.gives is None else f"+{self.gives[1]}")


class Disk:
    """A directory that processes work on, each under the log of calls; made when all that is in it is on disk."""

    def __init__(self, root: str):
        self.root = root
        self.folder = Folder()
        self._of_inode: dict[int, File | Folder] = {os.stat(root).st_ino: self.folder}
        self.changes: list[Change] = []
        self._first: dict[Folder, Entries] = {}
        self._take_in(self.root, self.folder)

    def _take_in(self, path: str, folder: Folder) -> None:
        for entry in os.scandir(path):
            found = self._new_object(entry)
            folder.entries[entry.name] = found
            if isinstance(found, Folder):
                self._take_in(entry.path, found)
            else:
                found.forced = found.now
        self._first[folder] = dict(folder.entries)

    def _new_object(self, entry: os.DirEntry) -> File | Folder:
        inode = entry.inode()
        if inode not in self._of_inode:
            self._of_inode[inode] = Folder() if entry.is_dir() else File(now=_read(entry.path))
        return self._of_inode[inode]

    # --------------------------------------------------------------------------------------------------------- replay

    def replay(self, calls: list[Call]) -> None:
        """Follow the calls of a process that is dead; its files are still as it left them."""
        forced_folders: list[tuple[int, Folder]] = []
        for call in calls:
            if call.error:
                continue
            if call.name in ("msync", "fsync", "fdatasync"):
                self._force(call, forced_folders)
            elif call.name == "photo":
                file = self._of_inode.get(call.inode)
                if isinstance(file, File):
                    file.photos.append((call.begin, call.offset, call.data))
            elif call.name in ("create", "link", "rename", "unlink", "mkdir", "rmdir"):
                self._rename(call)
        for change in self.changes:
            folder = change.gives[0] if change.gives is not None else change.takes[0]
            change.sure |= any(each is folder and begin > change.end for begin, each in forced_folders)
        self._compare(self.root, self.folder)
        for thing in set(self._of_inode.values()) | {c.gives[2] for c in self.changes if c.gives is not None}:
            if isinstance(thing, File):
                thing.settle()

    def _force(self, call: Call, forced_folders: list[tuple[int, Folder]]) -> None:
        thing = self._of_inode.get(call.inode)
        if isinstance(thing, Folder):
            forced_folders.append((call.begin, thing))
        elif thing is not None:
            offset = call.offset if call.name == "msync" else -1
            thing.forcings.append((call.begin, call.end, offset, call.data))

    def _find(self, path: str) -> tuple[Folder, str]:
        # The folder and the name that a path stood for at that time.
        folder = self.folder
        *parents, name = path.strip("/").split("/")
        for parent in parents:
            found = folder.entries.get(parent)
            assert isinstance(found, Folder), f"{path} lies in nothing that was made"
            folder = found
        return folder, name

    def _rename(self, call: Call) -> None:
        if not call.path.strip("/"):
            return  # The root itself was made or removed; the tests make it.
        takes = gives = None
        if call.name in ("create", "mkdir"):
            if call.name == "create" and not call.flags & IS_NEW:
                return
            # A number may be that of a file that is gone.
            thing = self._of_inode[call.inode] = Folder() if call.flags & IS_DIRECTORY else File()
            gives = (*self._find(call.path), thing)
        elif call.name == "link":
            gives = (*self._find(call.second), self._of_inode[call.inode])
        else:
            takes = self._find(call.path)
            thing = takes[0].entries.get(takes[1])
            if call.name == "rename":
                gives = (*self._find(call.second), thing)
                thing = gives[0].entries.get(gives[1])
            if isinstance(thing, File) and call.data:
                thing.now = call.data  # Its last name went.
        change = Change(takes, gives, call.end)
        self.changes.append(change)
        for each in (takes, gives):
            if each is not None:
                each[0].entries.pop(each[1], None)
        if gives is not None:
            gives[0].entries[gives[1]] = gives[2]

    def _compare(self, path: str, folder: Folder) -> None:
        # A call of a killed process may have been done, but not logged: then it is one that may be lost.
        there = {entry.name: entry for entry in os.scandir(path)}
        for name in [name for name in folder.entries if name not in there]:
            self.changes.append(Change((folder, name), None, 0))
            del folder.entries[name]
        for name, entry in there.items():
            found = self._new_object(entry)
            if folder.entries.get(name) is not found:
                self.changes.append(Change(None, (folder, name, found), 0))
                folder.entries[name] = found
            if isinstance(found, Folder):
                self._compare(entry.path, found)
            else:
                found.now = _read(entry.path)

    # ----------------------------------------------------------------------------------------------------------- loss

    def lose(self, target: str, dice: random.Random, *, loss: float, page: int, names: str) -> list[str]:
        """Make in the empty directory `target` what a power loss may have left; the changes of names that did not last.

        Parameters
        ----------
        loss : float
            How likely a page is lost that was not forced; 1 loses all that can be lost.
        page : int
            Bytes that are written or lost together.
        names : {"none", "all", "some", "first"}
            Which of the changes of names that nothing forced are there: none, all, any by the dice, or all up to one of
            them, as on a file system that keeps a journal.
        """
        unsure = [change for change in self.changes if not change.sure]
        if names == "none":
            kept = set()
        elif names == "all":
            kept = set(unsure)
        elif names == "some":
            kept = {change for change in unsure if dice.random() < 0.5}
        else:
            kept = set(unsure[: dice.randrange(len(unsure) + 1)])
        tree = {folder: dict(entries) for folder, entries in self._first.items()}
        for change in self.changes:
            if change.sure or change in kept:
                change.apply(tree)
        made: dict[File | Folder, str] = {}
        self._make(target, self.folder, tree, made, dice, loss, page)
        return [str(change) for change in unsure if change not in kept]

    def _make(self, path, folder, tree, made, dice, loss, page) -> None:
        for name, thing in sorted(tree.get(folder, {}).items()):
            place = os.path.join(path, name)
            if isinstance(thing, Folder):
                if thing in made:
                    continue  # Its old and its new name cannot both be there.
                made[thing] = place
                os.mkdir(place)
                self._make(place, thing, tree, made, dice, loss, page)
            elif thing in made:
                os.link(made[thing], place)
            else:
                made[thing] = place
                with open(place, "wb") as file:
                    file.write(thing.after_loss(dice, loss, page))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
