"""Files that are whole or not there."""

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
