"""Collects the positions of all ranks of a stalled run on one of them, through a store.

The store is one process. So that it can serve thousands of ranks, each rank makes a few calls, and
only the rank that collects makes one for each other rank.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any, Protocol, final

_ANSWERS = 20.0  # the longest wait for the other ranks' answers, seconds
_COLLECTING = 5.0  # how much longer the others wait for the rank that collects

Position = dict[str, Any]  # what `location_of` found, and the number of finished steps


class Store(Protocol):
    """The interface of torch's stores in use here: a key-value table shared by all ranks."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@final
class StalledRanks:
    """The answers of the ranks of one stall.

    Args:
        store: all ranks share it.
        rank: this rank.
        world: the number of ranks.
        seconds: the time without progress; ranks that stall within it again answer.
    """

    def __init__(self, store: Store, rank: int, world: int, seconds: float) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._patience = min(_ANSWERS, seconds)

    def collect(self, mine: Position) -> dict[int, Position] | None:
        """Answer with this rank's position; the positions by rank, if this rank is to report them.

        That is the first rank that answers. If it does not call `reported` in time, one of the
        others reports in its place. None for all others, once somebody has reported.
        """
        self._store.set(_key(self._rank), json.dumps(mine))
        if self._store.add(_key("answers"), 1) > 1 and self._is_reported():
            return None
        end = time.monotonic() + self._patience
        while self._store.add(_key("answers"), 0) < self._world and time.monotonic() < end:
            time.sleep(min(0.1, self._patience / 10))
        there = (rank for rank in range(self._world) if self._store.check([_key(rank)]))
        return {rank: json.loads(self._store.get(_key(rank))) for rank in there}

    def reported(self) -> None:
        """Let the other ranks go on, and return once the store knows it: this rank may have it."""
        self._store.set(_key("reported"), "")
        self._store.get(_key("reported"))

    def _is_reported(self) -> bool:
        """Wait until a rank has reported; False if none has, and this rank is to do it."""
        limit = timedelta(seconds=self._patience + _COLLECTING)
        try:
            self._store.wait([_key("reported")], limit)
        except RuntimeError:  # not in time; or the store is gone, which the next call raises
            return self._store.add(_key("second"), 1) > 1
        return True


def longest_wait(seconds: float) -> float:
    """The longest that `collect` takes while the store answers, in seconds."""
    return 2 * min(_ANSWERS, seconds) + _COLLECTING


def _key(what: int | str) -> str:
    return f"shardwright/stalled/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}"
