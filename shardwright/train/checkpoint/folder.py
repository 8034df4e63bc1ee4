"""A folder of checkpoints: completeness, the latest one, and retention.

A checkpoint is written into a folder aside, `step-….partial`, and gets its name
by a rename when all of it is there. So a name without the ending is a promise,
and a run that is killed at any moment leaves at most a folder that no one reads.
Knows nothing of what is inside a checkpoint but the list of its files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.train.checkpoint.reading import CheckpointError

FORMAT = "shardwright checkpoint"
VERSION = 1
RECORD = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_LARGEST_RECORD = 2**28  # bytes; more is no record of a run


@dataclass(frozen=True)
class Saved:
    """One complete checkpoint: its folder, its step, its files by size and its record."""

    folder: Path
    step: int
    sizes: Mapping[str, int]
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Checkpoints of one run in `path`; the `keep` last ones are kept."""

    path: Path
    keep: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise CheckpointError(f"keep={self.keep} checkpoints; at least 1 has to be kept")

    def open(self) -> None:
        """Make the folder and drop what killed runs left in it; on one rank only."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(left)
        except OSError as e:
            raise CheckpointError(
                f"cannot use {self.path} for checkpoints: {e.strerror}; give another folder"
            ) from e

    def staging(self, step: int) -> Path:
        """Where the checkpoint of `step` is written before it is complete."""
        return self.path / f"{_name(step)}{_PARTIAL}"

    def begin(self, step: int) -> Path:
        """The empty folder aside; on one rank, before any writes to it."""
        staging = self.staging(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging

    def abandon(self, step: int) -> None:
        """Delete a checkpoint that could not be written completely."""
        shutil.rmtree(self.staging(step), ignore_errors=True)

    def finish(self, step: int, record: Mapping[str, Any]) -> Path:
        """Give what was written aside its record and its name; drop those that are too old.

        Raises `OSError` if the disk does not take it.
        """
        staging, target = self.staging(step), self.path / _name(step)
        sizes = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        head = {"format": FORMAT, "version": VERSION, "step": step, "files": sizes}
        _write(staging / RECORD, json.dumps({**head, **record}))
        _sync(staging)
        if target.exists():  # one that is damaged, else the run had gone on from there
            self._drop(target)
        os.rename(staging, target)
        _sync(self.path)
        for old in self.names()[self.keep :]:
            self._drop(self.path / old)
        return target

    def names(self) -> list[str]:
        """Names of what calls itself a complete checkpoint, latest first."""
        try:
            found = [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as e:
            raise CheckpointError(f"cannot read {self.path}: {e.strerror}") from e
        named = [match for name in found if (match := _NAME.fullmatch(name))]
        return [m[0] for m in sorted(named, key=lambda m: int(m[1]), reverse=True)]

    def latest(self) -> tuple[Saved | None, list[str]]:
        """The latest checkpoint that is whole, and for later ones what is wrong with them."""
        wrong: list[str] = []
        for name in self.names():
            try:
                return read_record(self.path / name), wrong
            except CheckpointError as e:
                wrong.append(str(e))
        return None, wrong

    def _drop(self, folder: Path) -> None:
        """Rename the folder, then delete it: a half deleted one must not look complete."""
        staging = folder.with_name(f"{folder.name}.old{_PARTIAL}")
        shutil.rmtree(staging, ignore_errors=True)
        os.rename(folder, staging)
        shutil.rmtree(staging, ignore_errors=True)


def read_record(folder: Path) -> Saved:
    """The checkpoint in `folder`; raises `CheckpointError` unless all its files are whole."""
    file = folder / RECORD
    try:
        if file.stat().st_size > _LARGEST_RECORD:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, too many for a record")
        record = json.loads(file.read_bytes())
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} is damaged: {e}") from e
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of ours")
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format {record.get('version')}, this version reads {VERSION}"
        )
    step, sizes = record.get("step"), record.get("files")
    if type(step) is not int or folder.name != _name(step):
        raise CheckpointError(f"{file} is of step {step}, its folder is called {folder.name}")
    if not isinstance(sizes, dict) or any(type(size) is not int for size in sizes.values()):
        raise CheckpointError(f"{file} does not list its files")
    for name, size in sizes.items():
        if Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{file} lists {name!r}, which is no plain file name")
        _check_size(folder / name, size)
    return Saved(folder, step, sizes, record)


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


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Make the names in `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
