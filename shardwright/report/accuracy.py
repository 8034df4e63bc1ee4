"""Errors of predictions on published measurements that the presets were not fitted to.

`python -m benchmarks.published` writes `accuracy.json`: for each kind of GPU, how measurements of
sources that were held out compare with what was predicted for them. A prediction on that kind is
shown with the interval that holds nine of ten of them.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from shardwright.report.units import milliseconds, size

_LIKELY = 0.95  # share of measured peaks within a limit, above which a plan is said to fit


@dataclass(frozen=True, slots=True)
class MeasuredRatios:
    """Measured over predicted, of rows of sources that were held out.

    Attributes:
        rows: how many.
        sources: of how many sources.
        ratios: quantiles in equal steps from the least to the greatest.
    """

    rows: int
    sources: int
    ratios: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The ratio that this share of rows does not exceed."""
        place = share * (len(self.ratios) - 1)
        below = min(int(place), len(self.ratios) - 2)
        low, high = self.ratios[below : below + 2]
        return low + (place - below) * (high - low)

    def share_below(self, ratio: float) -> float:
        """The share of rows whose ratio is at most this."""
        return sum(one <= ratio for one in self.ratios) / len(self.ratios)

    def __str__(self) -> str:
        return f"{self.rows} measurements of {self.sources} source{'s' * (self.sources > 1)}"


def times_on(machine: str) -> MeasuredRatios | None:
    """The comparison of step times on the GPUs of a machine of this name; None without rows."""
    return _table()["times"].get(_kind(machine))


def peaks_on(machine: str) -> MeasuredRatios | None:
    """The comparison of peaks; those of all GPUs, whose allocator is the same."""
    return _table()["peaks"].get("every GPU") if _kind(machine) in _table()["kinds"] else None


def time_interval(
    seconds: float, machine: str, written: Callable[[float], str] = milliseconds
) -> str:
    """The interval of a predicted time by held-out measurements: "90 %: 1.2 s to 1.5 s, by ...".

    Empty for a machine that is no preset of a GPU. Times are in the units of `written`.
    """
    if _kind(machine) not in _table()["kinds"]:
        return ""
    found = times_on(machine)
    if found is None:
        return f"no comparable measurement of {_kind(machine)}"
    low, high = (seconds * found.quantile(share) for share in (0.05, 0.95))
    return f"90 %: {written(low)} to {written(high)}, by {found}"


def times_text(machine: str) -> str:
    """A sentence that compares predicted step times on these devices with measurements."""
    found = times_on(machine)
    if found is None:
        return f"step times: no comparable measurement of {_kind(machine)}"
    low, high = (found.quantile(share) - 1 for share in (0.05, 0.95))
    return (
        f"step times: 90 % of {found} that were held out are {low:+.0%} to {high:+.0%} of predicted"
    )


class Fit(enum.Enum):
    """The verdict of a predicted peak on a limit."""

    FITS = "fits"
    TRY = "try it"
    NOT = "does not fit"


def fit_of(peak: float, limit: float, found: MeasuredRatios | None) -> tuple[Fit, float]:
    """Whether a predicted peak fits, and the share of comparable peaks that would.

    Without a comparison the prediction decides.
    """
    sure = found.share_below(limit / peak) if found is not None and peak else float(peak <= limit)
    if 1 - _LIKELY < sure < _LIKELY:
        return Fit.TRY, sure
    return Fit.FITS if sure >= _LIKELY else Fit.NOT, sure


def verdict(peak: int, limit: int, machine: str) -> str:
    """Whether a predicted peak fits, with what is left or missing.

    Within the error of predicted peaks on GPUs it says to try.
    """
    room, fits = size(abs(limit - peak)), peak <= limit
    found = peaks_on(machine)
    what, sure = fit_of(peak, limit, found)
    if what is Fit.TRY:
        side = "to spare" if fits else "over"
        return f"may fit, within the error of predicted peaks ({room} {side}): try it"
    share = f"{max(sure, 1 - sure):.0%}" if found is not None else ""
    if what is Fit.FITS:
        return f"fits with {room} to spare" + f" ({share})" * bool(share)
    return f"does not fit ({', '.join(filter(None, [f'{room} over', share]))})"


def _kind(machine: str) -> str:
    """The kind of device in a name such as `2x8xA100 with memory=72GiB`, or the name."""
    found = re.match(r"(?:\d+ of )?(?:\d+x)?\d+x([A-Za-z][\w-]*)", machine)
    return found[1] if found else machine


@cache
def _table() -> Mapping[str, Mapping[str, MeasuredRatios | None]]:
    data = json.loads(files(__package__).joinpath("accuracy.json").read_text())
    found: dict[str, dict[str, MeasuredRatios | None]] = {
        name: {
            kind: MeasuredRatios(one["rows"], one["sources"], tuple(one["ratios"]))
            for kind, one in data[name].items()
        }
        for name in ("times", "peaks")
    }
    return found | {"kinds": dict.fromkeys(data["kinds"])}
