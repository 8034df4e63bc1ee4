"""Patches torch while a model is captured, in all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final


@final
class Patches:
    """A patch that is applied when the first thread needs it and reverted after the last.

    The patch itself must read a `ContextVar`, so that it has no effect in threads that capture
    nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: Callable[[], None] | None = None

    @contextmanager
    def applied(self, apply: Callable[[], Callable[[], None]]) -> Iterator[None]:
        """A context in which the patch is active: `apply` sets it and returns what reverts it."""
        with self._lock:
            if self._users == 0:
                self._undo = apply()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._undo is not None:
                    undo, self._undo = self._undo, None
                    undo()
