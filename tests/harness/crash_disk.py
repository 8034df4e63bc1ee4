"""A disk that forgets: every state that a power cut may leave of what a process wrote.

Calls that change files are recorded. Of a file lasts what it held when it was synced last; of
names last those changes that came before the last sync of a folder, and of the later ones any
first few, as a journal writes them in order.
"""

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Names:
    """The tree of a folder: files by path with their number, and folders."""

    files: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def apply(self, change: tuple[str, ...]) -> None:
        match change:
            case ("create", path, number):
                self.files[path] = int(number)
            case ("mkdir", path):
                self.folders.add(path)
            case ("remove", path):
                self.files.pop(path, None)
            case ("rmdir", path):
                self.folders.discard(path)
            case ("rename", old, new):
                self.files = {_moved(path, old, new): n for path, n in self.files.items()}
                self.folders = {_moved(path, old, new) for path in self.folders}


def _moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(f"{old}/") else path


@dataclass
class CrashDisk:
    """Records what happens below `root`, whose content at the beginning lasts."""

    root: Path
    at_start: Names = field(default_factory=Names)
    changes: list[tuple[str, ...]] = field(default_factory=list)  # of names, in order
    content: dict[int, bytes] = field(default_factory=dict)  # of files, when last synced
    lasting: int = 0  # the first changes of names that last
    states: list[tuple[int, int, dict[int, bytes]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, path in enumerate(sorted(self.root.rglob("*"))):
            name = str(path.relative_to(self.root))
            if path.is_dir():
                self.at_start.folders.add(name)
            else:
                self.at_start.files[name] = number
                self.content[number] = path.read_bytes()
        self.known = len(self.content)

    def note(self, *change: str) -> None:
        """Record a change of names."""
        self.changes.append(change)
        self.snapshot()

    def synced(self, path: str) -> None:
        """Record the sync of a file or a folder."""
        if os.path.isdir(path):
            self.lasting = len(self.changes)
        else:
            number = self.names(len(self.changes)).files[self.name(path)]
            self.content[number] = Path(path).read_bytes()
        self.snapshot()

    def snapshot(self) -> None:
        self.states.append((self.lasting, len(self.changes), dict(self.content)))

    def names(self, count: int) -> Names:
        """The tree after the first `count` changes."""
        found = Names(dict(self.at_start.files), set(self.at_start.folders))
        for change in self.changes[:count]:
            found.apply(change)
        return found

    def name(self, path: object) -> str:
        return os.path.relpath(os.fspath(path), self.root)

    def holds(self, path: object) -> bool:
        return not isinstance(path, int) and not self.name(path).startswith("..")

    def after_crashes(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """Each state that a power cut could leave, built in `folder`, and how much had happened."""
        done = set()
        for moment, (lasting, count, content) in enumerate(self.states):
            for kept in range(lasting, count + 1):
                names = self.names(kept)
                files = tuple(sorted((p, content.get(n, b"")) for p, n in names.files.items()))
                if (moment == len(self.states) - 1, files) in done:
                    continue
                done.add((moment == len(self.states) - 1, files))
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                for path in sorted(names.folders):
                    (folder / path).mkdir(parents=True, exist_ok=True)
                for path, data in files:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    (folder / path).write_bytes(data)
                yield moment, folder


@contextmanager
def crash_disk(root: Path) -> Iterator[CrashDisk]:
    """Record what this process does to files below `root`."""
    disk = CrashDisk(root)
    real = {name: getattr(os, name) for name in ("rename", "replace", "mkdir", "unlink", "rmdir")}
    real_open, real_fsync = io.open, os.fsync

    def opened(file, mode="r", *args, **kwargs):
        new = disk.holds(file) and set(mode) & set("wxa") and not os.path.exists(file)
        found = real_open(file, mode, *args, **kwargs)
        if new:
            disk.known += 1
            disk.note("create", disk.name(file), str(disk.known))
        return found

    def fsync(descriptor):
        real_fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if disk.holds(path):
            disk.synced(path)

    def moved(old, new, **places):
        real["rename"](old, new, **places)
        if disk.holds(new):
            disk.note("rename", disk.name(old), disk.name(new))

    def single(kind, call):
        def changed(path, *args, dir_fd=None, **kwargs):
            whole = path
            if dir_fd is not None:
                whole = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
            call(path, *args, dir_fd=dir_fd, **kwargs)
            if disk.holds(whole):
                disk.note(kind, disk.name(whole))

        return changed

    with pytest.MonkeyPatch.context() as patch:
        for module in ("builtins.open", "io.open"):
            patch.setattr(module, opened)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", moved)
        patch.setattr(os, "replace", moved)
        patch.setattr(os, "mkdir", single("mkdir", real["mkdir"]))
        patch.setattr(os, "rmdir", single("rmdir", real["rmdir"]))
        for name in ("unlink", "remove"):
            patch.setattr(os, name, single("remove", real["unlink"]))
        yield disk
