"""Files that commands write: a path that does not work is the user's mistake."""

from __future__ import annotations

from shardwright.cli.errors import UsageError
from shardwright.ir.files import write_whole


def write_text(path: str, text: str) -> None:
    """Write the whole file or nothing; raises `UsageError` where that is not possible."""
    try:
        write_whole(path, text)
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
