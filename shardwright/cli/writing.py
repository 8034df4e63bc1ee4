"""Text files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from shardwright.cli.errors import UsageError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write aside first, then rename, so that a reader never sees half of it."""
    target = Path(path)
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, target)
    except OSError as e:
        aside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
