"""Answers in a few lines what a plan costs, what limits it, what would help, and what else fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.memory import PARTS
from shardwright.ir.plan import Plan
from shardwright.ir.timeline import HOST_UPDATE, STATE_COPIES
from shardwright.planner.audit.avoidable import NOTHING, Avoidable
from shardwright.planner.audit.faster_links import FASTER, FasterLinks
from shardwright.planner.axes.plan_roles import MIXED, axis_uses
from shardwright.report.choice import StepParts
from shardwright.report.headline import headline
from shardwright.report.other_plans import ALTERNATIVES, OtherPlans, spread
from shardwright.report.summary import split_along
from shardwright.report.text.explain import gap
from shardwright.report.units import count, milliseconds, size, steps

_CAUSES = 4  # parts of the peak that are named
_LEAST = 0.01  # of the peak, or of the step: less is not named
_PACED = 0.1  # of the step: less of the host is not named
_STRATEGY = 76  # columns of a strategy in the table


def answer_lines(
    plan: Plan,
    costs: Sequence[tuple[float, int]],
    limit: int | None,
    avoidable: Avoidable = NOTHING,
) -> Iterator[tuple[str, str]]:
    """Name and text of lines: mixed axes, speed, memory, what limits the step, what would help.

    Args:
        plan: the chosen plan.
        costs: simulated seconds and bytes of other plans.
        limit: bytes per rank; None is no limit.
        avoidable: time that a faster host, or an update in one kernel, would save.
    """
    yield from _mixed(plan)
    yield "speed", _speed(plan)
    if text := _causes(plan):
        yield "memory", text
    yield "limited by", _limits(plan, avoidable.host)
    helps = (
        _fused_update(plan, avoidable.update),
        _faster_links(plan, avoidable.links),
        _more_memory(plan, costs, limit),
        _even_batch(plan),
    )
    if text := "; ".join(filter(None, helps)):
        yield "would help", text
    yield "optimum", gap(plan)


def model_text(plan: Plan, graph: Graph) -> str:
    """The parameters of the model, how many of them are trained, and what a step computes on."""
    sizes = {
        leaf.name: prod(graph.tensor[leaf.name].shape)
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    total = sum(sizes.values())
    trained = sum(size for name, size in sizes.items() if name in graph.trained)
    some = f" ({count(trained)} trained)" if trained < total else ""
    work, word = _work(plan)
    return f"{count(total)} parameters{some}, {work:,} {word} a step"


def alternatives(plan: Plan, others: OtherPlans, listed: int) -> list[str]:
    """A table of other plans that fit, with simulated time and memory, fastest first.

    They are faster than `plan` or need less memory by at least a hundredth.
    `listed` is the number of plans and baselines that were found. Empty if no other plan fits.
    """
    shown = spread(others.offered(plan), ALTERNATIVES)
    if not shown:
        return []
    rows = [
        f"{milliseconds(one.step_seconds):>10}  {size(one.peak_bytes):>9}  {_named(one, before)}"
        for before, one in pairwise((plan, *shown))
    ]
    hidden = listed - len(shown)
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


def _speed(plan: Plan) -> str:
    """Tokens or samples per second, in all and per device, and the model FLOPs utilisation."""
    rate, word = speed_of(plan)
    each = f", {rate / plan.devices:,.0f} per device" if plan.devices > 1 else ""
    speed = f"{rate:,.0f} {word}/s{each}"
    if plan.utilisation is None:
        return speed
    return f"{speed}, MFU {plan.utilisation:.1%} (useful operations, of the peak)"


def speed_of(plan: Plan) -> tuple[float, str]:
    """Tokens or samples per second, and which of the two."""
    work, word = _work(plan)
    return work / plan.step_seconds, word


def _even_batch(plan: Plan) -> str:
    """The next batch that divides among the devices; empty if this one does, or they among it."""
    counts = {one.shape[0] for one in plan.inputs if one.shape}
    if len(counts) != 1:
        return ""
    (samples,), devices = counts, plan.devices
    if samples % devices == 0 or devices % samples == 0:
        return ""
    even = -(-samples // devices) * devices
    return f"a batch of {even}: {samples} samples do not divide among {devices} devices"


def _work(plan: Plan) -> tuple[int, str]:
    """Tokens of a step if an input is a matrix of integers, else samples; and the word."""
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


def _limits(plan: Plan, host_seconds: float) -> str:
    """The parts of the step's time, greatest first; communication by its costliest axis.

    Operators and the update hide a part of the communication, which is named.
    """
    parts = StepParts.of(plan)
    groups = plan.pipeline.groups if plan.pipeline else 1  # parts are those of all stages
    whole = groups * plan.step_seconds
    host = host_seconds if host_seconds >= _PACED * whole else 0.0
    words = {
        "computing": parts.compute - host,
        "the host, which issues kernels": host,
        "communication": parts.communication,
        "update": 0.0 if "parameters" in plan.offload else parts.update,
        "update on the host": _seconds_of(HOST_UPDATE, plan),
        "copies of the optimizer's state": _seconds_of(STATE_COPIES, plan),
    }
    details = _costliest(plan)
    if groups > 1:
        words["waiting for other stages"] = whole - sum(words.values())
    elif (hidden := (sum(words.values()) - whole) / whole) >= _LEAST:
        details = [f"{hidden:.0%} hidden", *details]
    shares = {word: seconds / whole for word, seconds in words.items()}
    named = [word for word in sorted(words, key=lambda one: -words[one]) if shares[word] >= _LEAST]
    inside = {"communication": f" ({'; '.join(details)})" if details else ""}
    return ", ".join(f"{word} {shares[word]:.0%}{inside.get(word, '')}" for word in named)


def _seconds_of(name: str, plan: Plan) -> float:
    """Seconds of the tasks of that name, on all stages."""
    tasks = plan.timeline.tasks if plan.timeline is not None else ()
    return sum(task.seconds for task in tasks if task.name == name)


def _costliest(plan: Plan) -> list[str]:
    """The collective and axis that take most of the communication; empty if there is none."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for one in plan.transfers:
        seconds[steps(one.collectives)] += one.seconds
    return [f"most: {max(seconds, key=lambda name: seconds[name])}"] if seconds else []


def _fused_update(plan: Plan, saved: float) -> str:
    """The time with an update in one kernel; empty if little is saved."""
    groups = plan.pipeline.groups if plan.pipeline else 1
    part = saved / groups / plan.step_seconds
    about = "about " * (groups > 1)  # each group updates its own stages; this is their mean
    if part < _LEAST:
        return ""
    seconds = (1 - part) * plan.step_seconds
    return f"fused=True in the optimizer: {about}{milliseconds(seconds)} ({part:.0%} less time)"


def _faster_links(plan: Plan, links: FasterLinks | None) -> str:
    """The time with faster links; empty if they would save little."""
    if links is None:
        return ""
    gain = 1 - links.seconds / plan.step_seconds
    seconds = milliseconds(links.seconds)
    return f"{FASTER:g} times the bandwidth of the {links.level}: {seconds} ({gain:.0%} less time)"


def _more_memory(plan: Plan, costs: Sequence[tuple[float, int]], limit: int | None) -> str:
    """The times of faster plans that need more memory; empty if none is."""
    if limit is None:
        return ""
    faster = sorted(
        (seconds, peak)
        for seconds, peak in costs
        if peak > limit and seconds < (1 - _LEAST) * plan.step_seconds
    )
    if not faster:
        return ""
    least, fastest = min(faster, key=lambda cost: (cost[1], cost[0])), min(faster)
    saved = (least[0] - fastest[0]) / plan.step_seconds
    chosen = (least, fastest) if saved > _LEAST else (least,)
    return "memory: " + ", ".join(
        f"{size(peak)} per device for {milliseconds(seconds)}"
        f" ({1 - seconds / plan.step_seconds:.0%} less time)"
        for seconds, peak in chosen
    )


def _named(plan: Plan, before: Plan) -> str:
    """The kinds of parallelism of a plan, cut to the table.

    If those are the ones of the plan in the row `before`, also what differs most in memory.
    """
    text = headline(plan)
    if text == headline(before) and plan.memory is not None and before.memory is not None:
        now, then = plan.memory.parts(), before.memory.parts()
        part = max(now, key=lambda name: abs(now[name] - then[name]))
        less = now[part] - then[part]
        if abs(less) > _LEAST * plan.peak_bytes:
            text += f" · {PARTS[part]} {'+' if less > 0 else '−'}{size(abs(less))}"
    return text if len(text) <= _STRATEGY else f"{text[: _STRATEGY - 1]}…"
