"""The time and quality of a machine's measurement."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

BUSY = 0.15  # fraction of the cores used by other programs, above which times are unreliable
ERROR = 0.75  # median relative error of a class; on idle hosts classes stay below it


@dataclass(frozen=True, slots=True)
class Measured:
    """Date and quality of the measurement of a machine.

    Attributes:
        at: when the measurement ended.
        busy: part of the cores, 0 to 1, that other programs took meanwhile.
        errors: for each class of operators or collectives, the median and the largest relative
            error of the fit.
        assumed: figures that too few samples were usable for, as `"host bandwidth"`.
        instead: the preset that those figures were taken from.
        tuned_host: whether ranks tuned the host (`parallelize(tune_host=True)`), so that the
            figures hold for runs that do.
    """

    at: datetime
    busy: float
    errors: tuple[tuple[str, float, float], ...] = ()
    assumed: tuple[str, ...] = ()
    instead: str = ""
    tuned_host: bool = False

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to doubt the figures; empty if there are none."""
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
        """The age of the measurement, in words.

        >>> Measured(datetime(2026, 1, 1, tzinfo=UTC), 0.0).age(datetime(2026, 1, 3, tzinfo=UTC))
        '2 days ago'
        """
        minutes = int(((now or datetime.now(UTC)) - self.at).total_seconds() // 60)
        if minutes < 0:
            return "at a time that this host's clock has not reached"
        for size, unit in ((24 * 60, "day"), (60, "hour"), (1, "minute")):
            if count := minutes // size:
                return f"{count} {unit}{'s' if count > 1 else ''} ago"
        return "just now"
