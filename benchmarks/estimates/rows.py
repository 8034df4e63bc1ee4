"""What is compared, row by row, and the figures that all rows are held to."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import truediv
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from shardwright.ir.plan import Plan
from shardwright.ir.timeline import Stream

# A median of n normal figures is uncertain by 1.253 deviations over the root of n, and the middle
# half of them is 1.349 deviations wide.
_OF_MEDIAN = 1.253 / 1.349
_APART = 2.0  # times the uncertainty of a difference

Runs = list[list[float]]  # seconds of a plan's steps, in each run of ranks


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one model at one place.

    Predictions are means of those by the machine as it was before the steps and as it was after
    them; `drift` is how far these are apart, of the first. Measured is the median of the steps as
    they would be at the usual pace (`paced`). `spread` is how far the middle half of the steps are
    apart as they were, `paced_spread` that of what is left of it; `compute` is what of the step
    the slower rank computes (measured: CPU time of its main thread), and `busy` the part of the
    cores that other programs took.
    """

    place: str
    model: str
    plan: str
    mesh: str
    predicted_seconds: float
    measured_seconds: float
    spread: float
    predicted_compute: float
    measured_compute: float
    predicted_bytes: int
    measured_bytes: int
    steps: int
    busy: float
    drift: float
    of_runs: tuple[float, ...] = ()  # seconds in each run of ranks, which start anew
    times: int = 1  # that its model was measured, until it was quiet
    paced_spread: float | None = None  # None: of steps that were taken as they came

    @property
    def time_error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def compute_error(self) -> float:
        return self.predicted_compute / self.measured_compute - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def noise(self) -> float:
        """How uncertain the median of the steps is beside those of other plans, in seconds."""
        spread = self.spread if self.paced_spread is None else self.paced_spread
        return _OF_MEDIAN * spread * self.measured_seconds / math.sqrt(self.steps)

    def apart(self, other: Row) -> bool:
        """Whether the measurement tells the two plans apart: noise alone would hardly do so."""
        off = abs(self.measured_seconds - other.measured_seconds)
        return off > _APART * math.hypot(self.noise, other.noise)

    def __str__(self) -> str:
        return (
            f"{self.model:9} {self.plan:16} {self.predicted_seconds * 1e3:8.1f} ms predicted,"
            f" {self.measured_seconds * 1e3:8.1f} measured ({self.time_error:+.0%}, spread"
            f" {self.spread:.0%}, drift {self.drift:+.0%}, others {self.busy:.0%});"
            f" computing {self.compute_error:+.0%};"
            f" {self.predicted_bytes / 2**20:7.1f} MiB, {self.measured_bytes / 2**20:7.1f}"
            f" ({self.memory_error:+.0%})"
        )


def slower(runs: Sequence[Sequence[Mapping[str, Any]]]) -> Runs:
    """What the slower rank took, of what every rank of each run says."""
    return [[max(step) for step in zip(*(r["seconds"] for r in run), strict=True)] for run in runs]


def paced(plans: Sequence[Runs]) -> list[Runs]:
    """The steps as they would be if every round had the same pace.

    In a round every plan has a step; its pace is the median, over the plans, of the step beside
    all of that plan. What makes a shared host slow for some seconds makes a round slow, and plans
    are compared within rounds.
    """
    every = [[step for run in runs for step in run] for runs in plans]
    usual = [statistics.median(steps) for steps in every]
    rounds = zip(*every, strict=True)
    paces = [statistics.median(map(truediv, steps, usual)) for steps in rounds]
    found = []
    for runs in plans:
        left = iter(paces)
        found.append([[step / next(left) for step in run] for run in runs])
    return found


def row(
    place: str,
    model: str,
    name: str,
    plans: tuple[Plan, Plan],
    runs: Sequence[Sequence[Mapping[str, Any]]],
    steps: Runs,
) -> Row:
    """A plan, costed before and after, against the ranks of each run and the paced `steps`."""
    before, after = plans
    low, middle, high = statistics.quantiles([s for run in slower(runs) for s in run], n=4)
    least, usual, most = statistics.quantiles([s for run in steps for s in run], n=4)
    ranks = [rank for run in runs for rank in run]
    return Row(
        place=place,
        model=model,
        plan=name,
        mesh=str(before.mesh),
        predicted_seconds=statistics.mean(plan.step_seconds for plan in plans),
        measured_seconds=usual,
        spread=(high - low) / middle,
        predicted_compute=statistics.mean(map(_computing, plans)),
        measured_compute=max(statistics.median(rank["thread_seconds"]) for rank in ranks),
        predicted_bytes=before.peak_bytes,
        measured_bytes=max(rank["bytes"] for rank in ranks),
        steps=sum(map(len, steps)),
        busy=max(rank["busy"] for rank in ranks),
        drift=after.step_seconds / before.step_seconds - 1,
        of_runs=tuple(statistics.median(run) for run in steps),
        paced_spread=(most - least) / usual,
    )


def unrest(rows: Sequence[Row]) -> float:
    """How much the machine changed while a model's plans were measured, whatever was predicted."""
    return statistics.mean(max(one.spread, abs(one.drift)) for one in rows)


def _computing(plan: Plan) -> float:
    """Seconds of its operators and updates; in a pipeline, of the group that computes longest."""
    if plan.pipeline is not None and plan.timeline is not None:
        seconds: defaultdict[str, float] = defaultdict(float)
        for task in plan.timeline.tasks:
            if task.track.stream is Stream.COMPUTE and not task.idle:
                seconds[task.track.ranks] += task.seconds
        return max(seconds.values())
    return sum(op.seconds for op in plan.ops) + sum(one.seconds for one in plan.parameters)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that the estimates are held to, of at least one row."""
    by_model: dict[tuple[str, str], list[Row]] = {}
    for one in rows:
        by_model.setdefault((one.place, one.model), []).append(one)
    times = [abs(one.time_error) for one in rows]
    memory = [abs(one.memory_error) for one in rows]
    orders = [order(found) for found in by_model.values() if len(found) > 1]
    alike = [order_of_runs(found) for found in by_model.values() if len(found) > 1]
    known = [one for one in alike if one is not None]
    agreements = [agreement(found) for found in by_model.values()]
    chosen = [found for found in by_model.values() if found[0].plan == "chosen"]
    fastest = {
        f"{model}, {place}": found[0].measured_seconds / min(r.measured_seconds for r in found)
        for (place, model), found in by_model.items()
        if found[0].plan == "chosen"
    }
    return {
        "mean_time_error": statistics.mean(times),
        "worst_time_error": max(times),
        "mean_compute_error": statistics.mean(abs(one.compute_error) for one in rows),
        "mean_spearman": statistics.mean(orders) if orders else None,
        "mean_spearman_of_runs": statistics.mean(known) if known else None,
        "mean_memory_error": statistics.mean(memory),
        "worst_memory_error": max(memory),
        "chosen_over_fastest": fastest,
        "chosen_within_5_percent": sum(ratio <= 1.05 for ratio in fastest.values()),
        "chosen_within_noise": sum(not _beaten(found) for found in chosen),
        "pairs": sum(one.pairs for one in agreements),
        "pairs_apart": sum(one.apart for one in agreements),
        "pairs_apart_in_order": sum(one.in_order for one in agreements),
        "mean_spread": statistics.mean(one.spread for one in rows),
        "mean_busy": statistics.mean(one.busy for one in rows),
        "mean_drift": statistics.mean(abs(one.drift) for one in rows),
        "measured_again": {model: r[0].times for (_, model), r in by_model.items()},
    }


def order(rows: Sequence[Row]) -> float:
    """Spearman's correlation of predicted and measured times.

    Rows of one and the same plan, as where the chosen one is data parallelism, are one.
    """
    by_plan: dict[tuple[str, float, int], list[float]] = {}
    for one in rows:
        same = one.mesh, one.predicted_seconds, one.predicted_bytes
        by_plan.setdefault(same, []).append(one.measured_seconds)
    predicted = [seconds for _, seconds, _ in by_plan]
    if len(set(predicted)) == 1:
        return 1.0
    return float(spearmanr(predicted, list(map(statistics.mean, by_plan.values()))).statistic)


def order_of_runs(rows: Sequence[Row]) -> float | None:
    """Spearman's correlation of a run of ranks with another, on average over all pairs of runs.

    Rows of one and the same plan are one; None where there was one run, or one plan.
    """
    by_plan = {(one.mesh, one.predicted_seconds, one.predicted_bytes): one.of_runs for one in rows}
    if len(by_plan) < 2 or min(map(len, by_plan.values())) < 2:
        return None
    pairs = combinations(zip(*by_plan.values(), strict=True), 2)
    return statistics.mean(float(spearmanr(one, other).statistic) for one, other in pairs)


class Agreement(NamedTuple):
    """Pairs of plans: all, those that the measurement tells apart, and of these those foretold."""

    pairs: int
    apart: int
    in_order: int


def agreement(rows: Sequence[Row]) -> Agreement:
    """How often the faster of two plans was predicted to be, where noise leaves no doubt of it.

    The rank correlation counts every pair, and of two plans that take equally long noise says
    which is faster.
    """
    pairs = list(combinations(rows, 2))
    apart = [(one, other) for one, other in pairs if one.apart(other)]
    in_order = sum(
        (one.measured_seconds - other.measured_seconds)
        * (one.predicted_seconds - other.predicted_seconds)
        > 0
        for one, other in apart
    )
    return Agreement(len(pairs), len(apart), in_order)


def _beaten(rows: Sequence[Row]) -> bool:
    """Whether a plan is faster than the first by more than 5 %, and by more than noise."""
    first = rows[0]
    return any(
        first.measured_seconds > 1.05 * one.measured_seconds and first.apart(one)
        for one in rows[1:]
    )
