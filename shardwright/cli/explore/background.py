"""Finds plans in a thread of its own, for the values that were asked for last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardwright.cli.errors import one_line

T = TypeVar("T")
Values = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """The result for some values, or the line that says why there is none."""

    found: T | None = None
    error: str | None = None


class Background(Generic[T]):
    """Calls `find(values)` for the newest values, one call at a time, and keeps the results.

    Values that were replaced before their turn are not computed.
    """

    def __init__(self, find: Callable[[Values], T]) -> None:
        self._find = find
        self._answers: dict[tuple[tuple[str, int], ...], Answer[T]] = {}
        self._wanted: Values | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True, name="plans").start()

    def ask(self, values: Values, wait: float = 0.0) -> Answer[T] | None:
        """The answer, if it is known within `wait` seconds; else it is computed next."""
        key = tuple(values.items())
        with self._changed:
            if key not in self._answers:
                self._wanted = values
                self._changed.notify_all()
                self._changed.wait_for(lambda: key in self._answers, wait)
            return self._answers.get(key)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                values, self._wanted = self._wanted, None
                key = tuple(values.items()) if values is not None else ()
                known = key in self._answers  # asked for again while it was computed
            if values is None or known:
                continue
            try:
                answer = Answer(self._find(values))
            except Exception as error:  # a bug is shown on the page and ends no server
                answer = Answer(error=one_line(error))
            with self._changed:
                self._answers[key] = answer
                self._changed.notify_all()
