"""The time at which a search, and the choice between its plans, end."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

_TABLES = 0.6  # the part of the time in which plans are found; they are compared in the rest


@dataclass(frozen=True, slots=True)
class Deadline:
    """Times by the performance counter, in seconds.

    Attributes:
        tables: when no more plans are searched.
        end: when no more of them are simulated, but the one that is chosen.
        skips: whether no more meshes are searched then, if a plan fits; else all have their ends.
    """

    tables: float = math.inf
    end: float = math.inf
    skips: bool = True

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline of a search that starts now and may take so long."""
        now = time.perf_counter()
        return cls(now + _TABLES * seconds, now + seconds)

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be compared."""
        return time.perf_counter() >= self.end


NEVER = Deadline()
ENDS = Deadline(tables=-math.inf, skips=False)  # of a search for the ends of frontiers alone


def half_way(end: float) -> float:
    """The time in the middle of now and `end`; now, if that is over."""
    now = time.perf_counter()
    return now + max(0.0, end - now) / 2
