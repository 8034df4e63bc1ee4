"""Python's cyclic garbage collector, out of the way of planning.

A search makes many objects and no cycles. Beside a captured model every pass of the collector looks
at millions of objects of torch: all passes together take a tenth of a search, half of the walks
that settle memory, and a fifth of a command that plans a large model.
"""

from __future__ import annotations

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
            gc.enable()
