"""Pauses Python's cyclic garbage collector while planning.

A search makes many objects and no cycles. Beside a captured model every pass of the collector looks
at millions of objects of torch: all passes together take a tenth of a search, half of the walks
that settle memory, and a fifth of a command that plans a large model.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No pass of the collector until the end; it is left as it was found."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _grow_old()
            gc.enable()


@contextmanager
def paused_to_the_end() -> Iterator[None]:
    """As `paused`, and no pass when the process ends either: all is given back then anyway."""
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    with paused():
        yield


def _grow_old() -> None:
    """Count all objects as old ones: else the first thing that is made next starts a pass."""
    if not gc.get_freeze_count():  # what somebody else froze stays so
        gc.freeze()
        gc.unfreeze()
