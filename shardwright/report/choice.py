"""Explains the choice of a plan against its frontier neighbours and the baselines.

It decides nothing; every sentence states a difference of two plans' costs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from shardwright.ir.frontier import Frontier
from shardwright.ir.plan import Phase, Plan, PlannedTransfer
from shardwright.report.accuracy import time_interval, verdict
from shardwright.report.summary import shares_nothing
from shardwright.report.text.module_rows import module_tree
from shardwright.report.units import milliseconds, size, steps

_EQUAL = 1e-3  # relative difference of step times that is not mentioned
_REASONS = 2  # the most transfers named per baseline


class StepParts(NamedTuple):
    """The seconds of one optimizer step of a plan per rank, by purpose."""

    compute: float
    communication: float
    update: float

    @classmethod
    def of(cls, plan: Plan) -> StepParts:
        return cls(
            sum(op.seconds for op in plan.ops),
            sum(t.seconds for t in plan.transfers),
            sum(p.seconds for p in plan.parameters),
        )


class PeakParts(NamedTuple):
    """The peak memory of a plan's worst rank in bytes, by purpose."""

    state: int  # weights, gradients and optimizer state
    saved_for_backward: int
    other: int  # workspace, the batch, buffers of collectives

    @classmethod
    def of(cls, plan: Plan) -> PeakParts:
        costs = module_tree(plan).costs
        return cls(costs.state_bytes, costs.saved_bytes, costs.other_bytes)


def fit(plan: Plan, memory_limit: int | None) -> str:
    """A sentence: whether the plan fits, and with what margin, its devices, step time and peak.

    On GPUs with the interval that held-out measurements give the time (`accuracy.py`).

    `memory_limit` is in bytes per rank; None is no limit.
    """
    devices = f"{plan.devices} device{'s' * (plan.devices > 1)} of {plan.machine}"
    interval = time_interval(plan)
    step = f"{milliseconds(plan.step_seconds)} a step" + f" ({interval})" * bool(interval)
    needs = f"{step}, {size(plan.peak_bytes)} per device"
    same = "; every device computes all of it, so one would be as fast" * shares_nothing(plan)
    if memory_limit is None:
        return f"on {devices}: {needs}{same}"
    fits = verdict(plan, memory_limit)
    return f"{fits} on {devices}: {needs} of {size(memory_limit)}{same}"


def none_fits(frontier: Frontier, memory_limit: int | str | None = None) -> str:
    """A sentence if no plan of the frontier fits the devices, with advice; else empty.

    `memory_limit` is as in `Frontier.fastest`.
    """
    least, has = frontier[-1], frontier.limit(memory_limit)
    if has is None or least.peak_bytes <= has:
        return ""
    whose = "which has" if memory_limit is None else "which may use"
    needs = f"the smallest needs {size(least.peak_bytes)} per device, {whose} {size(has)}"
    return "; ".join(
        (
            f"none fits: of all plans for {least.devices} devices of {least.machine} {needs}: add"
            " devices or shrink the batch",
            *frontier.hints,
        )
    )


def why(
    chosen: Plan, frontier: Frontier, memory_limit: int | None = None, objective: str = "time"
) -> list[str]:
    """Sentences that explain why `chosen` is the answer: its rank, then the best of the baselines.

    That baseline is the fastest, or for `memory` the smallest, that fits and keeps the constraints.
    """
    place = _place(chosen, frontier, memory_limit, objective)
    permitted = [b for b in frontier.baselines if b.name not in frontier.broken]
    fitting = [b for b in permitted if memory_limit is None or b.peak_bytes <= memory_limit]
    if not fitting:  # by additive memory
        permitted = [frontier.compared(b) for b in permitted]
        fitting = [b for b in permitted if memory_limit is None or b.peak_bytes <= memory_limit]
    if fitting:
        smaller = objective == "memory"
        best = min(fitting, key=lambda b: b.peak_bytes if smaller else b.step_seconds)
        return [place, _against(chosen, frontier.compared(best))]
    if permitted:
        least = min(permitted, key=lambda b: b.peak_bytes)
        return [place, f"no baseline fits; {least.name} needs {size(least.peak_bytes)}"]
    return [place]


def _place(chosen: Plan, frontier: Frontier, limit: int | None, objective: str) -> str:
    """A sentence: what the objective required and which other plans it ruled out."""
    count = f"of {len(frontier)} plans on the frontier" if len(frontier) > 1 else "plan there is"
    if objective == "memory":
        text = f"the smallest {count}"
        if len(frontier) == 1:
            return text
        fastest = frontier.compared(frontier[0])
        slower = milliseconds(max(0.0, chosen.step_seconds - fastest.step_seconds))
        return f"{text}, {slower} slower than the fastest"
    devices = (
        f"on the fewest devices that fit, {chosen.devices}: " if objective == "devices" else ""
    )
    if limit is None:
        return f"{devices}the fastest {count}; no memory limit was given"
    faster = frontier.place_of(chosen)
    if faster is None:
        text = f"{devices}the fastest plan found that fits {size(limit)} per rank"
        return f"{text}; it is not on the frontier, as faster plans add up to less, but need more"
    text = f"{devices}the fastest {count} that fits {size(limit)} per rank"
    if not faster:
        return text
    needs = size(frontier.compared(frontier[faster - 1]).peak_bytes)
    return f"{text}; {faster} faster would need at least {needs}"


def _against(chosen: Plan, other: Plan) -> str:
    """A comparison with a baseline by parts, with the transfers that differ most."""
    if chosen.name == other.name:
        return f"it is the plan known as {other.name}, the best of the baselines"
    gain = other.step_seconds - chosen.step_seconds
    memory = other.peak_bytes - chosen.peak_bytes
    if abs(gain) <= _EQUAL * other.step_seconds:
        head = f"as fast as {other.name}, the best of the baselines"
    else:
        word = "faster" if gain > 0 else "slower"
        percent = 100 * abs(gain) / other.step_seconds
        head = (
            f"{milliseconds(abs(gain))} ({percent:.1f} %) {word} than {other.name}, the best of the"
        )
        head += " baselines"
    noticeable = _EQUAL * other.step_seconds
    parts = [
        f"{name} {milliseconds(mine)} instead of {milliseconds(theirs)}"
        for name, mine, theirs in zip(
            StepParts._fields, StepParts.of(chosen), StepParts.of(other), strict=True
        )
        if abs(mine - theirs) > noticeable
    ]
    if abs(memory) > _EQUAL * other.peak_bytes:
        parts.append(f"memory {size(chosen.peak_bytes)} instead of {size(other.peak_bytes)}")
    parts += _decisive_transfers(chosen, other, noticeable)
    return f"{head}: {'; '.join(parts)}" if parts else f"{head}, with the same costs"


def _decisive_transfers(chosen: Plan, other: Plan, noticeable: float) -> list[str]:
    """The transfers that only one of the two plans has."""
    mine, theirs = _by_name(chosen), _by_name(other)
    differences = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {**theirs, **mine}}
    largest = sorted(differences, key=lambda name: (-abs(differences[name]), name))[:_REASONS]
    found = []
    for name in largest:
        difference = differences[name]
        if abs(difference) > noticeable:
            verb = "saves" if difference > 0 else "adds"
            found.append(f"{verb} {milliseconds(abs(difference))} of {name}")
    return found


def _by_name(plan: Plan) -> dict[str, float]:
    """Seconds of communication by the value that is moved, with repeated modules combined."""
    modules = {op.name: op.source.module for op in plan.ops}
    parameters = {p.name for p in plan.parameters}
    seconds: defaultdict[str, float] = defaultdict(float)
    for transfer in plan.transfers:
        seconds[_name(transfer, modules, parameters)] += transfer.seconds
    return seconds


_OF = {
    Phase.FORWARD: "",
    Phase.RECOMPUTE: "the backward pass: ",
    Phase.BACKWARD: "gradients of ",
}


def _name(transfer: PlannedTransfer, modules: dict[str, str], parameters: set[str]) -> str:
    if transfer.value in parameters:
        what = _folded(transfer.value)
    else:
        module = modules.get(transfer.consumer, "")
        what = f"activations into {_folded(module) or 'the loss'}"
    return f"{steps(transfer.collectives)} for {_OF[transfer.phase]}{what}"


def _folded(path: str) -> str:
    """The path with the numbers of repeated modules replaced by a wildcard.

    >>> _folded("h.3.attn.weight")
    'h.*.attn.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
