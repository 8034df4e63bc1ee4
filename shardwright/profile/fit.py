"""Fits the figures of a machine to samples, and reports the errors of the fit.

The samples are those of `probes`, `update_probes` and `link_probes`. The formulas are those of the
cost model (`simulate/costs/compute.py`, `simulate/costs/collectives.py`), solved for the machine's
figures.

On a busy host some samples are zero, negative or not finite. They are dropped. A figure with too
few usable samples is taken from a known machine, and the result names it in `assumed`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite
from statistics import fmean, median

import numpy as np

from shardwright.machine.efficiency_curve import Curve, monotone
from shardwright.machine.model import INDEPENDENT, SKEWED_SECONDS, Device, Efficiency, Machine
from shardwright.machine.presets import preset as machine_preset
from shardwright.profile.probes import ISSUE
from shardwright.profile.timing import ARRIVAL_SKEW, Sample
from shardwright.profile.update_probes import CALLS

_CLOSE = 1.6  # the largest ratio of works that become one point of a curve
_LEAST_SECONDS = 1e-9  # seconds; no operator and no message takes less
_LEAST_PER_BYTE = 1e-15  # seconds per byte; less is no valid measurement of a link
# Kernels of one sample, including those of the backward pass.
_KERNELS = {
    "matmul": 3, "convolution": 3, "attention": 2, "memory": 1, "functions": 1, "pooling": 1,
    "update": CALLS,
}  # fmt: skip
_BY_FLOP = ("matmul", "convolution", "attention")
_BY_BYTES = ("memory", "functions", "pooling", "update")


@dataclass(frozen=True, slots=True)
class ComputeFigures:
    """Figures of a device, as in `machine.model.Device`, and the errors of their fit."""

    flop_per_s: tuple[tuple[str, float], ...]  # peak by dtype
    bytes_per_s: float
    launch_seconds: float
    dispatch_seconds: float
    parameter_seconds: float
    packing_seconds: float
    issue_seconds: float
    efficiency: Efficiency
    errors: Mapping[str, tuple[float, float]]  # by class: median and largest relative error
    assumed: tuple[str, ...] = ()  # names of the figures taken from the known device


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Figures of one level of links between `ranks` members.

    A collective takes `launch_seconds`, `hop_seconds` for each hop, and seconds per byte
    (`_terms`). `receives_terms` is as in `BackendSpec`.
    """

    ranks: int
    receives_terms: bool
    launch_seconds: float
    hop_seconds: float
    bytes_per_s: float
    gather_bytes_per_s: float
    errors: Mapping[str, tuple[float, float]]
    assumed: tuple[str, ...] = ()  # names of the figures taken from the known machine

    def seconds(self, kind: str, tile: float) -> float:
        """Predicted seconds of the collective `kind` on local tiles of `tile` bytes."""
        per_byte = 1 / self.bytes_per_s, 1 / self.gather_bytes_per_s
        figures = (self.launch_seconds, self.hop_seconds, *per_byte)
        return float(np.dot(_terms(kind, tile, self.ranks, self.receives_terms), figures))


def usable(samples: Sequence[Sample]) -> list[Sample]:
    """The samples whose work and seconds are finite and positive."""
    return [
        s
        for s in samples
        if isfinite(s.work) and isfinite(s.seconds) and s.work > 0 and s.seconds >= _LEAST_SECONDS
    ]


def fit_compute(samples: Sequence[Sample], known: Device | None = None) -> ComputeFigures:
    """Fit the figures of a device to samples of `probes` and `update_probes`.

    Args:
        samples: the samples; other kinds are ignored.
        known: the device whose figures replace those without usable samples; None: the preset
            `1xcpu`.
    """
    known = known or machine_preset("1xcpu").device
    single, assumed = _single_figures(samples, known)
    # The curves are those of the dtype that is trained in, which on GPUs is bfloat16 (`probes`).
    trained = "bfloat16" if any(s.kind == "matmul bfloat16" for s in samples) else "float32"
    by_name: defaultdict[str, list[Sample]] = defaultdict(list)
    for s in usable(samples):
        word, _, dtype = s.kind.partition(" ")
        if word in _KERNELS:
            other = word == "matmul" and dtype != trained
            by_name[s.kind if other else word].append(s)
    fixed = {n: single["dispatch" if n == "update" else "launch"] for n in by_name}
    typical = {name: _rates(found, fixed[name]) for name, found in by_name.items()}
    peaks = {
        name.partition(" ")[2] or trained: max(by_work.values())
        for name, by_work in typical.items()
        if name.startswith("matmul")
    }
    for dtype in {"float32", trained}.difference(peaks):
        assumed.append(f"compute.{dtype}")
        peaks[dtype] = known.peak_flop_per_s(dtype)
    # Convolutions may be faster than matrix products: the peak is that of the best class.
    classes = [max(typical[name].values()) for name in _BY_FLOP if name in typical]
    best = max([peaks[trained], *classes]) / peaks[trained]
    peaks = {dtype: best * peak for dtype, peak in peaks.items()}
    streams = [max(typical[name].values()) for name in ("memory", "update") if name in typical]
    if not streams:
        assumed.append("memory_bandwidth")
    moved = max(streams, default=known.bytes_per_s)
    top = {**dict.fromkeys(_BY_FLOP, peaks[trained]), **dict.fromkeys(_BY_BYTES, moved)}
    curves = {
        name: _rounded_points(monotone({work: rate / top[name] for work, rate in by.items()}))
        for name, by in typical.items()
        if name in (*_BY_FLOP, *_BY_BYTES)
    }
    errors = {
        name: _errors([(s, _predicted(s, fixed[name], curve, top[name])) for s in by_name[name]])
        for name, curve in curves.items()
    }
    efficiency, unknown = _efficiency(curves, known)
    return ComputeFigures(
        tuple((dtype, _figure(peak)) for dtype, peak in peaks.items()),
        _figure(moved),
        _figure(single["launch"]),
        _figure(single["dispatch"]),
        _figure(single["parameter"]),
        _figure(single["packing"]),
        _figure(single[ISSUE]),
        efficiency,
        errors,
        (*assumed, *unknown),
    )


def _single_figures(samples: Sequence[Sample], known: Device) -> tuple[dict[str, float], list[str]]:
    """Overheads in seconds by name, and the names of those taken from `known`."""
    found = {s.kind: s.seconds / s.work for s in usable(samples)}
    launch = known.launch_seconds
    preset = {
        "launch": launch,
        "dispatch": launch if known.dispatch_seconds is None else known.dispatch_seconds,
        "parameter": known.parameter_seconds,
        "packing": launch if known.packing_seconds is None else known.packing_seconds,
    }
    if known.issue_seconds:  # of a device that runs beside the host
        preset[ISSUE] = known.issue_seconds
    figures = {name: found.get(name, figure) for name, figure in preset.items()}
    assumed = [name for name in preset if name not in found]
    return {ISSUE: found.get(ISSUE, 0.0), **figures}, assumed


def _efficiency(curves: Mapping[str, Curve], known: Device) -> tuple[Efficiency, list[str]]:
    """Efficiencies of all classes, and the names of those taken from the `known` device."""
    names = (*_BY_FLOP, *_BY_BYTES)
    parts = {name: curves.get(name) or getattr(known.efficiency, name) for name in names}
    return Efficiency(**parts), [f"efficiency.{name}" for name in names if name not in curves]


def _rates(samples: Sequence[Sample], launch: float) -> dict[float, float]:
    """The median work per second of kernels of one class, by the work of a kernel.

    Samples that consist mostly of launches are dropped, except for the largest one.
    """
    rates: defaultdict[float, list[float]] = defaultdict(list)
    largest = max(samples, key=lambda s: s.work)
    for s in samples:
        kernels = _kernels(s)
        busy = s.seconds - kernels * launch
        if busy > s.seconds / 2 or s is largest:
            rates[s.work / kernels].append(s.work / max(busy, s.seconds / 2))
    close: dict[float, list[float]] = {}  # samples of similar work become one point of a curve
    least = 0.0
    for work in sorted(rates):
        if not close or work > _CLOSE * least:
            least = work
            close[least] = []
        close[least] += rates[work]
    return {work: median(found) for work, found in close.items()}


def _kernels(s: Sample) -> int:
    return _KERNELS.get(s.kind.partition(" ")[0], 1)


def fit_links(
    samples: Sequence[Sample],
    level: str,
    ranks: int,
    receives_terms: bool,
    known: Machine | None = None,
) -> LinkFigures:
    """Fit the figures of one level of links.

    Bandwidth is the slope between the two largest messages, because small messages may exceed the
    sustained rate or fit into caches. Launch and hop minimize the squared relative errors of
    all-reduces and all-gathers of all sizes; negative figures become 0 and the others are fitted
    again.

    Args:
        samples: the samples of all levels.
        level: the name of the level.
        ranks: the number of members of the level.
        receives_terms: as in `BackendSpec`.
        known: the machine whose figures replace those that the samples do not determine, which are
            all of them without all-reduces of two sizes; None: the preset `2xcpu`.
    """
    words = [(s.kind.partition(" "), s) for s in usable(samples)]
    mine = [(parts[2], s) for parts, s in words if parts[0] == level]
    fitted = [(kind, s) for kind, s in mine if kind in ("all_reduce", "all_gather")]
    found = _known_links(level, ranks, receives_terms, known or machine_preset("2xcpu"))
    if len({s.work for kind, s in fitted if kind == "all_reduce"}) > 1:
        rows = np.array([_terms(kind, s.work, ranks, receives_terms) for kind, s in fitted])
        figures = _link_figures(rows, np.array([s.seconds for _, s in fitted]))
        found = _measured_links(found, figures.tolist(), level)
    by_kind: defaultdict[str, list[tuple[Sample, float]]] = defaultdict(list)
    for kind, s in mine:
        by_kind[kind].append((s, found.seconds(kind, s.work)))
    return replace(found, errors={kind: _errors(pairs) for kind, pairs in by_kind.items()})


def _known_links(level: str, ranks: int, receives_terms: bool, known: Machine) -> LinkFigures:
    """Figures of the `known` machine's level of this name, else of its outermost one."""
    same = [one for one in known.levels if one.name == level]
    one = same[0] if same else known.levels[-1]
    gathers = one.gather_bytes_per_s or one.bytes_per_s
    names = tuple(f"{level} {name}" for name in ("latency", "bandwidth", "gather_bandwidth"))
    launch, hop = known.collective_launch_seconds, one.latency_seconds
    return LinkFigures(ranks, receives_terms, launch, hop, one.bytes_per_s, gathers, {}, names)


def _measured_links(known: LinkFigures, figures: Sequence[float], level: str) -> LinkFigures:
    """`known` with these `figures`, except for rates that they do not determine."""
    launch, hop, per_byte, per_gathered = figures
    summed, gathered = (rate > _LEAST_PER_BYTE for rate in (per_byte, per_gathered))
    names = {f"{level} bandwidth": summed, f"{level} gather_bandwidth": gathered}
    return replace(
        known,
        launch_seconds=_figure(launch),
        hop_seconds=_figure(hop),
        bytes_per_s=_figure(1 / per_byte) if summed else known.bytes_per_s,
        gather_bytes_per_s=_figure(1 / per_gathered) if gathered else known.gather_bytes_per_s,
        assumed=tuple(name for name, shown in names.items() if not shown),
    )


def fit_skew(samples: Sequence[Sample]) -> tuple[float, float]:
    """The mean wait for the slowest rank, and the exponent with which it grows.

    The first figure is in seconds, after `SKEWED_SECONDS` of computation; 0 without samples. The
    wait grows with a power of the time of computation, from 0.5 for independent disturbances to 1
    for a rank that is always slower.
    """
    samples_of_skew = [s for s in usable(samples) if s.kind == ARRIVAL_SKEW]
    if not samples_of_skew:
        return 0.0, INDEPENDENT
    times = np.log([s.work / SKEWED_SECONDS for s in samples_of_skew])
    waits = np.log([s.seconds for s in samples_of_skew])
    power = INDEPENDENT
    if len({s.work for s in samples_of_skew}) > 1:
        power = float(np.clip(np.polyfit(times, waits, 1)[0], INDEPENDENT, 1.0))
    return _figure(exp(float(np.mean(waits - power * times)))), float(f"{power:.3g}")


def fit_overlap(samples: Sequence[Sample], links: LinkFigures, kind: str) -> float | None:
    """The fraction of a collective's time that overlaps with computation, from 0 to 1.

    The increase of the time of computation by collectives in flight is the exposed part. It is
    divided by the seconds that `links` predict for the collectives alone, which plans are charged.
    Returns None if there are no usable samples.
    """
    seconds = defaultdict(list)
    for s in usable(samples):
        seconds[s.kind].append(s.seconds)
    computed, both = seconds[f"overlap {kind} compute"], seconds[f"overlap {kind} both"]
    if not computed or not both:
        return None
    shown = fmean(both) - fmean(computed)
    tile = next(s.work for s in usable(samples) if s.kind == f"overlap {kind} both")
    return float(f"{min(1.0, max(0.0, 1 - shown / links.seconds(kind, tile))):.3g}")


def fit_contention(samples: Sequence[Sample]) -> float | None:
    """The fraction of its time by which an all-reduce delays one along another mesh axis.

    From 0 to 1; 1 if it was not measured, and None if too few samples are usable.
    """
    seconds = defaultdict(list)
    for s in usable(samples):
        seconds[s.kind].append(s.seconds)
    if not all(seconds[f"axes {word}"] for word in ("outer", "inner", "both")):
        return None if any(s.kind.startswith("axes ") for s in samples) else 1.0
    outer, inner, both = (fmean(seconds[f"axes {word}"]) for word in ("outer", "inner", "both"))
    delay = 1 - (outer + inner - both) / min(outer, inner)
    return float(f"{min(1.0, max(0.0, delay)):.3g}")


def _terms(kind: str, tile: float, n: int, receives_terms: bool) -> list[float]:
    """Coefficients of launch, hop, and seconds per byte reduced and per byte gathered.

    `tile` are the bytes of the local tile, and `n` the ranks.
    """
    laps = n - 1
    summed, gathered = [1, 2 * laps, 2 * laps / n * tile, 0], [1, laps, 0, laps * tile]
    if kind == "all_reduce":
        return summed
    if kind == "all_gather":
        return gathered
    per_byte = laps / n * tile
    if kind == "reduce_scatter" and receives_terms:  # by messages, as gathers
        return [1, laps, 0, per_byte]
    return [1, laps, per_byte / (n if kind == "all_to_all" else 1), 0]


def _link_figures(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Launch, hop, seconds per byte reduced and gathered, (4,), fitted to rows of `_terms`."""
    per_byte = np.array([_slope(rows[:, column], seconds) for column in (2, 3)])
    known = [column for column, slope in zip((2, 3), per_byte, strict=True) if slope > 0]
    left = seconds - rows[:, known] @ per_byte[per_byte > 0]
    free = [column for column in range(4) if column not in known]
    figures = np.zeros(4)
    figures[known] = per_byte[per_byte > 0]
    figures[free] = _non_negative(rows[:, free], left, seconds)
    figures[2:] = np.maximum(figures[2:], _LEAST_PER_BYTE)
    return figures


def _slope(factors: np.ndarray, seconds: np.ndarray) -> float:
    """Seconds per unit between the two largest values of a coefficient; 0 with fewer."""
    sizes: list[float] = sorted({factor for factor in factors.tolist() if factor > 0})[-2:]
    if len(sizes) < 2:
        return 0.0
    small, large = (float(np.median(seconds[factors == size])) for size in sizes)
    return max(0.0, (large - small) / float(sizes[1] - sizes[0]))


def _non_negative(rows: np.ndarray, left: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The least squares of errors relative to `seconds`, without negative figures."""
    weighted, wanted = rows / seconds[:, None], left / seconds
    free = list(range(rows.shape[1]))
    while True:
        figures = np.zeros(rows.shape[1])
        figures[free] = np.linalg.lstsq(weighted[:, free], wanted, rcond=None)[0]
        negative = [i for i in free if figures[i] < 0]
        if not negative:
            return figures
        free.remove(min(negative, key=lambda i: figures[i]))


def _predicted(s: Sample, launch: float, curve: Curve, peak: float) -> float:
    kernels = _kernels(s)
    return kernels * launch + s.work / (peak * curve.at(s.work / kernels))


def _errors(found: Sequence[tuple[Sample, float]]) -> tuple[float, float]:
    """Median and largest of the relative errors of (sample, predicted seconds)."""
    errors = [abs(guess / sample.seconds - 1) for sample, guess in found]
    return (median(errors), max(errors)) if errors else (0.0, 0.0)


def _rounded_points(curve: Curve) -> Curve:
    """The curve with its points rounded to four digits."""
    return Curve(tuple((_figure(work), _figure(part)) for work, part in curve.points))


def _figure(value: float) -> float:
    return float(f"{value:.4g}")
