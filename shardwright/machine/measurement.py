"""The time and quality of a machine's measurement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

BUSY = 0.15  # part of the cores; with more than this taken by others, times are not this host's
ERROR = 0.75  # median of a class; on quiet hosts kinds of operators in one class differ by less


@dataclass(frozen=True, slots=True)
class Measured:
    """How a measurement went.

    * `at`: when it ended;
    * `busy`: the part of the cores that other programs took meanwhile;
    * `errors`: of each class of operators or collectives, how far the figures are from the samples
      that they were fitted to: median and largest relative error;
    * `assumed`: figures that too few samples were usable for, as `host bandwidth`; they are those
      of the preset `instead`.
    """

    at: datetime
    busy: float
    errors: tuple[tuple[str, float, float], ...] = ()
    assumed: tuple[str, ...] = ()
    instead: str = ""

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the figures should not be believed; none where they may."""
        found = []
        if self.busy > BUSY:
            found.append(f"other programs took {self.busy:.0%} of the cores meanwhile")
        if self.assumed:
            found.append(
                f"too few samples of {', '.join(self.assumed)} were usable, so those figures are"
                f" of the preset {self.instead}"
            )
        worst = max(self.errors, key=lambda error: error[1], default=("", 0.0, 0.0))
        if worst[1] > ERROR:
            found.append(f"the figures miss half of the samples of {worst[0]} by {worst[1]:.0%}")
        return tuple(found)

    def age(self, now: datetime | None = None) -> str:
        """How long ago it was, in words.

        >>> Measured(datetime(2026, 1, 1, tzinfo=UTC), 0.0).age(datetime(2026, 1, 3, tzinfo=UTC))
        '2 days ago'
        """
        minutes = int(((now or datetime.now(UTC)) - self.at).total_seconds() // 60)
        for size, unit in ((24 * 60, "day"), (60, "hour"), (1, "minute")):
            if count := minutes // size:
                return f"{count} {unit}{'s' if count > 1 else ''} ago"
        return "just now"
