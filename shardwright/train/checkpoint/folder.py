"""A folder of checkpoints: completeness, the latest one, and retention.

A checkpoint is written into a temporary folder, `step-….partial`, which is renamed to `step-…` when
all files are written. So a folder without the ending is complete, and a run that is killed at any
time leaves only a temporary folder, which is never read. This module knows the sizes and digests of
a checkpoint's files, not their content.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.ir.atomic_io import read_up_to, sync_folder, write_atomically
from shardwright.train.checkpoint.digests import digest_of_file, digest_of_text
from shardwright.train.checkpoint.lock import lock_folder
from shardwright.train.checkpoint.reading import CheckpointError

FORMAT = "shardwright checkpoint"
VERSION = 2
_WITHOUT_DIGESTS = 1  # a version that is still read
RECORD = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_SEAL = "digest"  # the key of the digest of the rest of the record
_LARGEST_RECORD = 2**28  # bytes; a larger file is no record of a run
_LARGEST_FILE = 2**30  # bytes of a file without tensors: the index of a million tiles has 200 MiB


@dataclass(frozen=True)
class SavedCheckpoint:
    """One complete checkpoint: its folder, its step, the bytes of each file, and its record.

    `has_digests` is False if an earlier version wrote it.
    """

    folder: Path
    step: int
    sizes: Mapping[str, int]
    record: Mapping[str, Any]
    has_digests: bool


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints of one run in `path`, of which the latest `keep` are kept."""

    path: Path
    keep: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise CheckpointError(f"keep={self.keep} checkpoints; at least 1 has to be kept")

    def open(self, patience: float = 0) -> None:
        """Create and lock the folder, and delete incomplete checkpoints; on one rank only.

        Raises `CheckpointError` if another process keeps the lock for longer than `patience`
        seconds, or if the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
            lock_folder(self.path, patience)
            for left in self.path.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(left)
        except OSError as e:
            raise CheckpointError(
                f"cannot use {self.path} for checkpoints: {e.strerror}; give another folder"
            ) from e

    def staging(self, step: int) -> Path:
        """The folder in which the checkpoint of `step` is written before it is complete."""
        return self.path / f"{_name(step)}{_PARTIAL}"

    def begin(self, step: int) -> Path:
        """Create the empty temporary folder, on one rank, before any rank writes to it."""
        staging = self.staging(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def abandon(self, step: int) -> None:
        """Delete a checkpoint that could not be written completely."""
        shutil.rmtree(self.staging(step), ignore_errors=True)

    def finish(self, step: int, record: Mapping[str, Any], digested: Container[str] = ()) -> Path:
        """Write the record, rename the temporary folder, and delete checkpoints beyond `keep`.

        The record has the digests of all files but the `digested`, whose digests are in a file of
        their own. Raises `OSError` if the disk cannot be written.
        """
        staging, target = self.staging(step), self.path / _name(step)
        files = sorted(staging.iterdir())
        head = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "files": {file.name: file.stat().st_size for file in files},
            "digests": {f.name: digest_of_file(f) for f in files if f.name not in digested},
        }
        write_atomically(staging / RECORD, sealed({**head, **record}))
        if target.exists():  # damaged, or the run would have resumed from it
            self._drop(target)
        os.rename(staging, target)
        sync_folder(self.path)
        for old in self.names()[self.keep :]:
            self._drop(self.path / old)
        return target

    def names(self) -> list[str]:
        """Names of folders that are named as complete checkpoints, latest first."""
        try:
            found = [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path}: {e.strerror}") from e
        named = [match for name in found if (match := _NAME.fullmatch(name))]
        return [m[0] for m in sorted(named, key=lambda m: int(m[1]), reverse=True)]

    def latest(self, before: int | None = None) -> tuple[SavedCheckpoint | None, list[str]]:
        """The latest undamaged checkpoint before a step, and the errors of those after it.

        `before` excludes that step and later ones; None: all steps count.
        """
        wrong: list[str] = []
        for name in self.names():
            if before is not None and _step(name) >= before:
                continue
            try:
                return read_record(self.path / name), wrong
            except CheckpointError as e:
                wrong.append(str(e))
        return None, wrong

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps, so that `keep` does not count them."""
        for name in self.names():
            if _step(name) > step:
                aside = self.path / f"{name}{_DAMAGED}"
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.path / name, aside)
        sync_folder(self.path)

    def _drop(self, folder: Path) -> None:
        """Rename the folder, then delete it: a partly deleted one must not look complete."""
        staging = folder.with_name(f"{folder.name}.old{_PARTIAL}")
        shutil.rmtree(staging, ignore_errors=True)
        os.rename(folder, staging)
        shutil.rmtree(staging, ignore_errors=True)


def read_record(folder: Path) -> SavedCheckpoint:
    """The checkpoint in `folder`.

    Raises `CheckpointError` unless its record is valid, all files have their sizes, and those with
    a digest in the record have it.
    """
    file = folder / RECORD
    try:
        record = json.loads(read_up_to(file, _LARGEST_RECORD))
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} is damaged: {e}") from e
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of ours")
    version = record.get("version")
    if version not in (_WITHOUT_DIGESTS, VERSION):
        raise CheckpointError(f"{file} has format {version}, this version reads {VERSION}")
    if version == VERSION and record.pop(_SEAL, None) != digest_of_text(json.dumps(record)):
        raise CheckpointError(f"{file} is damaged: its digest is another")
    step, sizes = record.get("step"), record.get("files")
    if type(step) is not int or folder.name != _name(step):
        raise CheckpointError(f"{file} is of step {step}, its folder is called {folder.name}")
    if not isinstance(sizes, dict) or any(type(size) is not int for size in sizes.values()):
        raise CheckpointError(f"{file} does not list its files")
    for name, size in sizes.items():
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{file} lists {name!r}, which is no plain file name")
        _check_size(folder / name, size)
    if version == _WITHOUT_DIGESTS:
        return SavedCheckpoint(folder, step, sizes, record, has_digests=False)
    digests = record.get("digests")
    if not isinstance(digests, dict) or not digests.keys() <= sizes.keys():
        raise CheckpointError(f"{file} does not list the digests of its files")
    for name, digest in digests.items():
        if sizes[name] > _LARGEST_FILE:
            raise CheckpointError(f"{folder / name} has {sizes[name]} bytes, too many for it")
        _check_digest(folder / name, digest)
    return SavedCheckpoint(folder, step, sizes, record, has_digests=True)


def _check_digest(file: Path, digest: str) -> None:
    try:
        found = digest_of_file(file)
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}") from e
    if found != digest:
        raise CheckpointError(f"{file} is damaged: its digest is another")


def sealed(record: Mapping[str, Any]) -> str:
    """The record as JSON, with its own digest."""
    plain = json.loads(json.dumps(record))  # keys are strings, as after reading
    return json.dumps({**plain, _SEAL: digest_of_text(json.dumps(plain))})


def _check_size(file: Path, size: int) -> None:
    try:
        found = file.lstat()
    except OSError as e:
        raise CheckpointError(f"{file} is missing") from e
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{file} is no plain file")
    if found.st_size != size:
        raise CheckpointError(f"{file} has {found.st_size} bytes, {size} were written")


def _name(step: int) -> str:
    return f"step-{step:08}"


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))
