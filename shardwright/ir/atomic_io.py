"""Atomic file writes, and reads up to a size."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` aside first, then rename, so that a reader never sees half of it.

    Raises `OSError`, and leaves nothing behind, where that is not possible.
    """
    target, aside = _target_and_aside(path)
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _target_and_aside(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The file to write, and the one beside it that is renamed to it.

    Raises `OSError` for what a rename must not replace: a folder, a device, a pipe.
    """
    target = Path(path)
    if not target.name or target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    return target, target.with_name(f"{target.name}.{os.getpid()}.tmp")


def check_file(path: str | os.PathLike[str], *, make_folder: bool = False) -> None:
    """Raise `OSError` where `write_whole` could not write; nothing is left behind.

    With `make_folder` the file's folder is made before it is written, and need not be there.
    """
    target, aside = _target_and_aside(path)
    if make_folder and not target.parent.exists():
        check_folder(target.parent)
        return
    try:
        aside.touch()
    finally:
        aside.unlink(missing_ok=True)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` where no folder `path` can be made, or none of its files be written."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
    with tempfile.TemporaryFile(dir=folder):  # it never has a name
        pass


class FileSizeError(ValueError):
    """A file with more bytes than anything of its kind has."""


def read_within(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a file that someone else may have written.

    Raises `FileSizeError` for one of more than `most_bytes`, before they are read, `OSError` and
    `UnicodeDecodeError`.
    """
    if not isinstance(path, str | os.PathLike):  # a number is a file that is open
        raise OSError(errno.EINVAL, f"a {type(path).__name__} is no path")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A device has no size, and no end.
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
    if size > most_bytes or len(data) > most_bytes:
        raise FileSizeError(f"it has {max(size, len(data))} bytes, at most {most_bytes} are read")
    return data.decode("utf-8")
