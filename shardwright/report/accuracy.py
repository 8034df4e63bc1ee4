"""Errors of predictions on published measurements that the presets were not fitted to.

`python -m benchmarks.published` writes `accuracy.json`: how measurements of sources that were held
out compare with what was predicted for them, by the conditions that decide how far predictions are
off. A prediction is shown with the interval that holds nine of ten measurements under its own
conditions, or with the first condition that no such measurement has.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import op_word
from shardwright.report.units import milliseconds, size

_LIKELY = 0.95  # share of measured peaks within a limit, above which a plan is said to fit
_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "tf32": 32, "float64": 64}
_EXPERTS = ("experts", "grouped_mm_fallback", "_grouped_mm")  # kinds of operators
_ATTENTION = ("attention", "softmax", "_softmax")
_CONVOLVES = 0.1  # of the seconds of operators: more are no transformer's
_LEAST_PEAK = 2**30  # bytes; smaller peaks were not measured
_PACES = ((0.02, "under 20 ms"), (0.1, "20 to 100 ms"))  # seconds of a micro-batch
_SLOW = "100 ms and more"


class MeasuredUnder(NamedTuple):
    """The conditions of measurements that decide how far predictions are off.

    Attributes:
        kind: of GPU, as presets name it.
        model: whether it has experts, or attention.
        products: the bits of most matrix products.
        layers: whether layers are compiled.
        stages: whether there is a pipeline.
        pace: the class of the predicted seconds of a micro-batch; the host decides short ones.
    """

    kind: str
    model: str
    products: str
    layers: str
    stages: str
    pace: str

    @classmethod
    def of(
        cls,
        kind: str,
        *,
        experts: bool,
        attention: bool = True,
        bits: int,
        compiled: bool,
        pipeline: bool,
        seconds: float,
    ) -> MeasuredUnder:
        """The conditions in words; `bits` 0 are unknown, `seconds` those of a micro-batch."""
        dense = "dense transformers" if attention else "models without attention"
        pace = next((word for limit, word in _PACES if seconds < limit), _SLOW)
        return cls(
            kind,
            "mixtures of experts" if experts else dense,
            f"products in {bits} bits" if bits else "products of an unknown dtype",
            "compiled layers" if compiled else "eager layers",
            "pipelines" if pipeline else "plans without stages",
            f"micro-batches of {pace}",
        )


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


def conditions_of(plan: Plan) -> MeasuredUnder:
    """The conditions of a plan."""
    kinds = {op.kind for op in plan.ops}
    convolves = sum(op.seconds for op in plan.ops if "conv" in op.kind)
    bits = 8 if plan.numerics.fp8 else _BITS.get(plan.dtype, 0)
    return MeasuredUnder.of(
        _kind(plan.machine),
        experts=not kinds.isdisjoint(_EXPERTS),
        attention=any(op_word(kind) in _ATTENTION for kind in kinds)
        and convolves <= _CONVOLVES * sum(op.seconds for op in plan.ops),
        bits=bits,
        compiled=plan.compiled,
        pipeline=plan.pipeline is not None,
        seconds=plan.step_seconds / plan.micro_batches,
    )


def time_interval(plan: Plan, written: Callable[[float], str] = milliseconds) -> str:
    """The interval of a plan's time by held-out measurements: "90 %: 1.2 s to 1.5 s, by ...".

    Where none is comparable it says so, with the condition that is missing. Empty for a machine
    that is no preset of a GPU. Times are in the units of `written`.
    """
    if _kind(plan.machine) not in _table().kinds:
        return ""
    found = _compared(conditions_of(plan))
    if isinstance(found, str):
        return f"no comparable measurement of {found}"
    low, high = (plan.step_seconds * found.quantile(share) for share in (0.05, 0.95))
    return f"90 %: {written(low)} to {written(high)}, by {found}"


def _compared(under: MeasuredUnder) -> MeasuredRatios | str:
    """The measurements under these conditions, or the first condition that none has."""
    times = _table().times
    left = [one for one in times if one.kind == under.kind]
    if not left:
        return under.kind
    for name, asked in under._asdict().items():
        left = [one for one in left if getattr(one, name) == asked]
        if not left:
            return f"{asked} on {under.kind}"
    return times[left[0]]


def times_text(machine: str) -> list[str]:
    """Sentences that compare predicted step times on these devices with measurements."""
    kind, found = _kind(machine), _table().times
    sentences = []
    for under, ratios in found.items():
        if under.kind == kind:
            low, high = (ratios.quantile(share) - 1 for share in (0.05, 0.95))
            sentences.append(
                f"step times of {', '.join(under[1:])}: 90 % of {ratios} that were held out are"
                f" {low:+.0%} to {high:+.0%} of predicted"
            )
    return sentences or [f"step times: no comparable measurement of {kind}"]


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


def fit_on(plan: Plan, limit: int) -> tuple[Fit, float]:
    """`fit_of` a plan's predicted peak, by peaks measured on GPUs if its devices are among them."""
    return fit_of(plan.peak_bytes, limit, _peaks_of(plan.machine))


def may_fit(plan: Plan, limit: int | None) -> bool:
    """Whether the error of predicted peaks is too large to say that a plan fits, or does not."""
    return limit is not None and fit_on(plan, limit)[0] is Fit.TRY


def verdict(plan: Plan, limit: int) -> str:
    """Whether a plan's predicted peak fits `limit` bytes, with what is left or missing.

    It may fit within the error of predicted peaks on GPUs. The share of measured peaks that
    would fit is that of plans like those measured: of dense transformers in 16 bits or less.
    """
    room, side = size(abs(limit - plan.peak_bytes)), "to spare"
    if plan.peak_bytes > limit:
        side = "over"
    what, sure = fit_on(plan, limit)
    if what is Fit.TRY:
        return f"may fit ({room} {side}, within the error of predicted peaks)"
    error = ""
    if _peaks_of(plan.machine) is not None:
        error = "no comparable peak was measured"
        if _has_measured_peaks(plan):
            would = "would" if what is Fit.FITS else "would not"
            error = f"{max(sure, 1 - sure):.0%} of comparable measured peaks {would}"
    if what is Fit.FITS:
        return f"fits with {room} to spare" + f" ({error})" * bool(error)
    return f"does not fit ({'; '.join(filter(None, [f'{room} over', error]))})"


def _peaks_of(machine: str) -> MeasuredRatios | None:
    """Measured peaks over predicted ones; None for devices on which none were measured."""
    return _table().peaks if _kind(machine) in _table().kinds else None


def _has_measured_peaks(plan: Plan) -> bool:
    """Whether peaks of plans like this one were measured, on whichever GPU: one allocator."""
    under = conditions_of(plan)
    like = MeasuredUnder.of(
        under.kind, experts=False, bits=16, compiled=False, pipeline=False, seconds=0.0
    )
    narrow = bool(plan.numerics.fp8) or under.products == like.products
    return under.model == like.model and narrow and plan.peak_bytes >= _LEAST_PEAK


def _kind(machine: str) -> str:
    """The kind of device in a name such as `2x8xA100 with memory=72GiB`, or the name."""
    found = re.match(r"(?:\d+ of )?(?:\d+x)?\d+x([A-Za-z][\w-]*)", machine)
    return found[1] if found else machine


class _Accuracy(NamedTuple):
    """The content of the file: kinds of GPUs, times by conditions, and peaks of every GPU."""

    kinds: tuple[str, ...]
    times: Mapping[MeasuredUnder, MeasuredRatios]
    peaks: MeasuredRatios | None


@cache
def _table() -> _Accuracy:
    data = json.loads(files(__package__).joinpath("accuracy.json").read_text())
    times = {
        MeasuredUnder(*(one[name] for name in MeasuredUnder._fields)): _ratios(one)
        for one in data["times"]
    }
    peaks = data["peaks"]
    return _Accuracy(tuple(data["kinds"]), times, None if peaks is None else _ratios(peaks))


def _ratios(data: Mapping[str, Any]) -> MeasuredRatios:
    return MeasuredRatios(data["rows"], data["sources"], tuple(data["ratios"]))
