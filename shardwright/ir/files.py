"""Files that are whole or not there when they are written, and of a size to be read."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` aside first, then rename, so that a reader never sees half of it.

    Raises `OSError`, and leaves nothing behind, where that is not possible.
    """
    target = Path(path)
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


class FileSizeError(ValueError):
    """A file with more bytes than anything of its kind has."""


def read_within(path: str | os.PathLike[str], most_bytes: int) -> str:
    """The text of a file that someone else may have written.

    Raises `FileSizeError` for one of more than `most_bytes`, before they are read, `OSError` and
    `UnicodeDecodeError`.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A device has no size, and no end.
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
    if size > most_bytes or len(data) > most_bytes:
        raise FileSizeError(f"it has {max(size, len(data))} bytes, at most {most_bytes} are read")
    return data.decode("utf-8")
