"""The memory of this host."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container; "max" where there is none


def host_bytes() -> int:
    """Bytes of memory of this host, or of the container in which this process runs."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _LIMIT.exists() and (text := _LIMIT.read_text().strip()).isdigit():
        return min(total, int(text))
    return total
