"""Texts that are kept in the user's cache folder, from one command to the next.

An entry that is damaged, or that another user can write, is ignored. Keys that depend on the
installation use its digest (`installed`).
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from platform import node

from shardwright.ir.atomic_io import read_text_up_to, write_atomically

_LARGEST = 2**28  # bytes of an entry; the graph of a model of 128 layers has some MiB
_MOST_ENTRIES = 64
# Variables that may select another implementation of an operator, or another device.
_VARIABLES = ("CUDA", "HF_", "PYTORCH", "TORCH", "TRANSFORMERS", "USE_", "HIP", "ROCR", "XPU")


@dataclass(frozen=True, slots=True)
class UserCache:
    """The entries in `folder`, by key."""

    folder: Path

    @classmethod
    def of_user(cls, name: str) -> UserCache:
        """The cache of this name in the user's cache folder."""
        home = os.environ.get("XDG_CACHE_HOME")
        root = Path(home) if home else Path.home() / ".cache"
        return cls(root / "shardwright" / name)

    def find(self, key: str) -> str | None:
        """The text of this key; None if there is none or its entry cannot be trusted."""
        try:
            file = self.file(key)
            _require_private(self.folder)
            _require_private(file)
            digest, _, text = read_text_up_to(file, _LARGEST).partition("\n")
        except (OSError, ValueError):  # as if there were none
            return None
        if digest != digest_of(text):
            return None
        with suppress(OSError):  # the entries that were not used for longest are removed first
            os.utime(file)
        return text

    def keep(self, key: str, text: str) -> None:
        """Write an entry, and remove the oldest ones; no entry where that is not possible."""
        with suppress(OSError):  # e.g. a read-only disk: the next command does without
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _require_private(self.folder)
            write_atomically(self.file(key), f"{digest_of(text)}\n{text}")
            self.file(key).chmod(0o600)
            self._remove_oldest()

    def file(self, key: str) -> Path:
        """The file of an entry."""
        return self.folder / f"{key}.json"

    def _remove_oldest(self) -> None:
        entries = sorted(self.folder.glob("*.json"), key=lambda one: -one.stat().st_mtime)
        for entry in entries[_MOST_ENTRIES:]:
            entry.unlink(missing_ok=True)


def digest_of(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def installed() -> str:
    """A digest of the host, Python, installed packages, and the code that captures."""
    found = hashlib.sha256()
    for part in _parts_of_installation():
        found.update(part.encode())
        found.update(b"\0")
    return found.hexdigest()


def _require_private(path: Path) -> None:
    """Raise `OSError` unless this user owns `path` and nobody else can write it."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(f"{path} is a link")
    if os.name == "posix" and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise OSError(f"others can write {path}")


def _parts_of_installation() -> Iterator[str]:
    yield from (node(), sys.platform, sys.version, sys.prefix)
    yield from (f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES))
    for folder in dict.fromkeys(sys.path):  # names of these files have the versions
        with suppress(OSError):
            names = os.listdir(folder or ".")
            yield from sorted(one for one in names if one.endswith((".dist-info", ".egg-info")))
    for package in ("shardwright", "transformers"):  # both may be installed from sources
        yield from _files_of(package)


def _files_of(package: str) -> Iterator[str]:
    """Path, size and time of every Python file of a package, which is not imported."""
    spec = find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(name for name in names if name.endswith(".py")):
                file = os.stat(os.path.join(folder, name))
                yield f"{folder}/{name} {file.st_size} {file.st_mtime_ns}"
