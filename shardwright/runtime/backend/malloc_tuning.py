"""Keeps freed memory in the process on CPU ranks, so that the next step reuses it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of parameters in glibc's malloc.h
_NEVER = -1  # as a trim threshold
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have `malloc` keep what is freed for what is allocated next; whether it does now.

    glibc gives large blocks back to the system as they are freed, and the end of the heap too, and
    the next operator's pages are mapped and zeroed one by one: up to half of what a convolution
    takes. A process's peak stays what it is. Nothing is done where the user has set any of this
    by variables of mallopt(3), or where `malloc` is not glibc's. Again, it changes nothing.
    """
    tuned = "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
    if tuned or any(name in environment for name in _USERS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_MAX, 0))
