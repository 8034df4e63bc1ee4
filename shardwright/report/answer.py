"""Answers in a few lines what a plan costs, what limits it, what would help, and what else fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from shardwright.ir.frontier import Frontier
from shardwright.ir.memory import PARTS
from shardwright.ir.plan import Plan
from shardwright.planner.axes.plan_roles import MIXED, axis_uses
from shardwright.report.choice import StepParts
from shardwright.report.headline import headline
from shardwright.report.summary import split_along
from shardwright.report.text.explain import gap
from shardwright.report.units import milliseconds, size

_CAUSES = 4  # parts of the peak that are named
_LEAST = 0.01  # of the peak, or of the step: less is not named
_ALTERNATIVES = 5
_STRATEGY = 60  # columns of a strategy in the table


def answer_lines(
    plan: Plan,
    costs: Sequence[tuple[float, int]],
    limit: int | None,
    useful_seconds: float | None = None,
) -> Iterator[tuple[str, str]]:
    """Name and text of lines: mixed axes, speed, memory, what limits the step, what would help.

    Args:
        plan: the chosen plan.
        costs: seconds and bytes of the plans among which it was chosen, fastest first.
        limit: bytes per rank; None is no limit.
        useful_seconds: of a step's useful operations at the peak of one device, if known.
    """
    yield from _mixed(plan)
    yield "speed", _speed(plan, useful_seconds)
    if text := _causes(plan):
        yield "memory", text
    yield "limited by", _limits(plan)
    if text := _more_memory(plan, costs, limit):
        yield "would help", text
    yield "optimum", gap(plan)


def alternatives(plan: Plan, frontier: Frontier, limit: int | None) -> list[str]:
    """A table of other plans that fit, with simulated time and memory, fastest first.

    Empty if no other plan fits.
    """
    place = frontier.place_of(plan)
    fitting = [
        index
        for index, (_, peak) in enumerate(frontier.costs)
        if index != place and (limit is None or peak <= limit)
    ]
    if not fitting:
        return []
    part = (len(fitting) - 1) / (_ALTERNATIVES - 1)
    kept = dict.fromkeys(fitting[round(i * part)] for i in range(_ALTERNATIVES))
    plans = [frontier.compared(frontier[index]) for index in kept]
    shown = [one for one in plans if limit is None or one.peak_bytes <= limit]
    if not shown:
        return []
    rows = [
        f"{milliseconds(one.step_seconds):>10}  {size(one.peak_bytes):>9}  {_named(one)}"
        for one in sorted(shown, key=lambda one: one.step_seconds)
    ]
    hidden = len(frontier) + len(frontier.baselines) - len(shown) - (place is not None)
    more = f"  ({hidden} more with the baselines: --all)" if hidden > 0 else ""
    return [f"others that fit:{more}", *rows]


def _mixed(plan: Plan) -> Iterator[tuple[str, str]]:
    """The dimensions that every axis splits along which modules do different things."""
    axes = list(zip(plan.layout_mesh.axes, axis_uses(plan), strict=True))
    mixed = [
        f"{name}={size} splits {split_along(plan, axis)}"
        for axis, ((name, size), use) in enumerate(axes)
        if size > 1 and use.role == MIXED
    ]
    if mixed:
        yield "mixed", f"{'; '.join(mixed)}, by compute time"


def _speed(plan: Plan, useful_seconds: float | None) -> str:
    """Tokens or samples per second, in all and per device, and the model FLOPs utilisation."""
    units, word = _units(plan)
    rate = units / plan.step_seconds
    each = f", {rate / plan.devices:,.0f} per device" if plan.devices > 1 else ""
    speed = f"{rate:,.0f} {word}/s{each}"
    if useful_seconds is None:
        return speed
    part = useful_seconds / (plan.step_seconds * plan.devices)
    return f"{speed}, MFU {part:.1%} (useful operations, of the peak)"


def _units(plan: Plan) -> tuple[int, str]:
    """The size of a step's batch, in tokens if an input is a matrix of integers."""
    for one in plan.inputs:
        if len(one.shape) == 2 and one.dtype.startswith("int"):
            return prod(one.shape), "tokens"
    return next((one.shape[0] for one in plan.inputs if one.shape), 1), "samples"


def _causes(plan: Plan) -> str:
    """The largest parts of the peak, on the rank that needs most."""
    if plan.memory is None:
        return ""
    parts = plan.memory.parts()
    largest = sorted(parts, key=lambda name: -parts[name])[:_CAUSES]
    return ", ".join(
        f"{PARTS[name]} {size(parts[name])}"
        for name in largest
        if parts[name] > _LEAST * plan.peak_bytes
    )


def _limits(plan: Plan) -> str:
    """The parts of the step's time, greatest first; communication by its costliest axis."""
    parts = StepParts.of(plan)
    words = {
        "computing": parts.compute,
        f"communication{_costliest(plan)}": parts.communication,
        "update": parts.update,
    }
    shares = {word: seconds / plan.step_seconds for word, seconds in words.items()}
    named = sorted(shares, key=lambda word: -shares[word])
    return ", ".join(f"{word} {shares[word]:.0%}" for word in named if shares[word] >= _LEAST)


def _costliest(plan: Plan) -> str:
    """The collective and axis that take most of the communication, in brackets."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for one in plan.transfers:
        seconds[" + ".join(one.collectives)] += one.seconds
    if not seconds:
        return ""
    return f" (most: {max(seconds, key=lambda name: seconds[name])})"


def _more_memory(plan: Plan, costs: Sequence[tuple[float, int]], limit: int | None) -> str:
    """The times of faster plans that need more memory; empty if none is."""
    if limit is None:
        return ""
    faster = [
        (seconds, peak)
        for seconds, peak in costs
        if peak > limit and seconds < (1 - _LEAST) * plan.step_seconds
    ]
    if not faster:
        return ""
    chosen = dict.fromkeys((faster[-1], faster[0]))
    return "memory: " + ", ".join(
        f"{size(peak)} per device for {milliseconds(seconds)}"
        f" ({1 - seconds / plan.step_seconds:.0%} faster)"
        for seconds, peak in chosen
    )


def _named(plan: Plan) -> str:
    """The kinds of parallelism of a plan, cut to the table."""
    text = headline(plan)
    return text if len(text) <= _STRATEGY else f"{text[: _STRATEGY - 1]}…"
