"""Atomic and durable file writes; reads up to a size of files and texts that others wrote."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from pathlib import Path

# C0 and C1 control characters, line and paragraph separators, those that change the direction of a
# text, and halves of surrogate pairs, which no terminal or file can be given.
_UNPRINTABLE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)

_CHUNK = 2**20  # bytes read at a time


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to a temporary file and rename it, so that a reader never sees half of it.

    Once it returns, the file survives a power cut. Raises `OSError`, and leaves no file behind,
    where that is not possible.
    """
    target, temporary = _target_and_temporary(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def replace_durably(written: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Rename the file `written` to `path`, in the same folder or file system, atomically.

    Once it returns, the file survives a power cut. Raises `OSError`.
    """
    with open(written, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_folder(Path(path).parent)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, where its file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that may be written and not be listed
        return
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems without it
            raise
    finally:
        os.close(descriptor)


def _target_and_temporary(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The file to write, and the temporary file in the same folder that is renamed to it.

    Raises `OSError` for a target that a rename must not replace: a folder, a device, a pipe.
    """
    target = Path(path)
    if not target.name or target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    return target, target.with_name(f"{target.name}.{os.getpid()}.tmp")


def check_file(path: str | os.PathLike[str], *, make_folder: bool = False) -> None:
    """Raise `OSError` where `write_atomically` could not write; leaves no file behind.

    With `make_folder` the caller makes the file's folder before writing, so it need not exist.
    """
    target, temporary = _target_and_temporary(path)
    if make_folder and not target.parent.exists():
        check_folder(target.parent)
        return
    try:
        temporary.touch()
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` where the folder `path` cannot be made, or no file written in it."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file")
    with tempfile.TemporaryFile(dir=folder):  # it never has a name
        pass


class FileSizeError(ValueError):
    """A file that is too large to be what it should be."""


def read_text_up_to(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of an untrusted file.

    Raises the errors of `read_up_to`, and `UnicodeDecodeError`.
    """
    return read_up_to(path, most_bytes).decode("utf-8")


def read_up_to(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The bytes of an untrusted file.

    Raises `FileSizeError` for a file of more than `most_bytes`, before it is read, and `OSError`,
    also for what is no regular file (a pipe may never end).
    """
    if not isinstance(path, str | os.PathLike):  # `open` takes an int as a file descriptor
        raise OSError(errno.EINVAL, f"a {type(path).__name__} is no path")
    # Opening a pipe without a writer would wait for one.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        # A file may grow, and `read` allocates all that it is asked for.
        data = bytearray()
        while max(found.st_size, len(data)) <= most_bytes and (part := file.read(_CHUNK)):
            data += part
    if (size := max(found.st_size, len(data))) > most_bytes:
        raise FileSizeError(f"it has {size} bytes, at most {most_bytes} are read")
    return bytes(data)


def check_printable(text: str) -> None:
    """Raise `ValueError` for a text that would do something to a terminal."""
    if found := _UNPRINTABLE.search(text):
        raise ValueError(f"{text[:60]!r} has the control character {found[0]!r}")


def printable(text: str) -> str:
    r"""The text with control characters written as escapes.

    >>> printable("\x1b[2J")
    '\\x1b[2J'
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)
