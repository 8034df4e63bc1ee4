"""Summarises a plan in one line: the split of every mesh axis and of parameters."""

from __future__ import annotations

from collections import defaultdict

from shardwright.ir.layout import Shard
from shardwright.ir.plan import Plan, PlannedOp

_SHOWN = 4  # most module names in one line
_ALL, _NONE = 0.995, 0.05  # shares of the compute time that are reported as all and nothing
_KINDS = {  # kinds of parallelism by split dimension
    "batch": "data",
    "sequence": "sequence",
    "experts": "expert",
    "batch to experts": "expert",
}
LEGEND = (
    "splits X (n%): X is split in n % of the compute time, the rest is repeated along that axis"
)


def summary(plan: Plan) -> str:
    """A one-line summary of a plan, such as "dp=2 splits batch; wte sharded"."""
    axes = [
        f"{name}={size} splits {_compute(plan, axis)}"
        for axis, (name, size) in enumerate(plan.layout_mesh.axes)
        if size > 1
    ]
    if plan.micro_batches > 1:
        axes.append(f"{plan.micro_batches} micro-batches")
    if not any(size > 1 for size in plan.mesh.shape):
        return "; ".join(["one device", *axes, *_recomputed(plan)])
    if plan.stages > 1:
        axes.append(f"{plan.stages} stages, {plan.schedule}")
    return "; ".join([*axes, _parameters(plan), *_recomputed(plan)])


def shares_nothing(plan: Plan) -> bool:
    """Whether several devices each compute everything and hold all parameters."""
    axes = [axis for axis, (_, size) in enumerate(plan.layout_mesh.axes) if size > 1]
    whole = all(_compute(plan, axis) == "nothing" for axis in axes)
    replicated = all(parameter.layout.is_replicated for parameter in plan.parameters)
    return plan.devices > 1 and plan.stages == 1 and whole and replicated


def parallelism(plan: Plan) -> str:
    """The kinds of parallelism of a plan, such as "4-way data x 2-way tensor".

    Every axis counts as the kind with most of its compute time. Data parallelism is called sharded
    where a parameter is sharded along its axis.
    """
    found: dict[str, int] = {}
    for axis, (_, size) in enumerate(plan.layout_mesh.axes):
        if size > 1:
            kind = _kind(plan, axis)
            found[kind] = found.get(kind, 1) * size
    text = " x ".join(f"{size}-way {kind}" for kind, size in sorted(found.items(), key=_data_first))
    staged = f"a pipeline of {plan.stages} stages" if plan.stages > 1 else ""
    return " x ".join(filter(None, [f"{text} parallel" if text else "", staged])) or "one device"


def _kind(plan: Plan, axis: int) -> str:
    """The kind of parallelism along one axis, by the split with most of the compute time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in plan.ops:
        if what := _what(op, axis):
            seconds[_KINDS.get(what.split(" (")[0], "tensor")] += op.seconds
    if not seconds:
        return "repeated"
    kind = max(seconds, key=lambda one: seconds[one])
    stored = (p.layout.placements[axis] for p in plan.parameters)
    return "sharded data" if kind == "data" and any(isinstance(p, Shard) for p in stored) else kind


def _data_first(item: tuple[str, int]) -> tuple[bool, str]:
    return "data" not in item[0], item[0]


def _compute(plan: Plan, axis: int) -> str:
    """The dimensions that one axis splits, by share of the compute time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for op in plan.ops:
        if (what := _what(op, axis)) is not None:
            seconds[what] += op.seconds
    total = sum(seconds.values())
    seconds.pop("", None)
    shares = {what: spent / total for what, spent in seconds.items() if spent > _NONE * total}
    return ", ".join(
        what if share >= _ALL else f"{what} ({share:.0%})"
        for what, share in sorted(shares.items(), key=lambda item: -item[1])
    ) or ("nothing" if not seconds else "hardly anything")


def _what(op: PlannedOp, axis: int) -> str | None:
    """The dimension that `op` splits along the axis, or empty; None for passed partial sums."""
    word = op.splits[axis].removesuffix(" (sum)")
    return {"-": "", "partial sums": None}.get(word, word)


def _parameters(plan: Plan) -> str:
    sharded: defaultdict[str, int] = defaultdict(int)
    whole = 0
    for parameter in plan.parameters:
        if parameter.layout.is_replicated:
            whole += 1
        else:
            owner = parameter.name.rpartition(".")[0].rpartition(".")[2]
            sharded[owner or parameter.name] += parameter.bytes
    if not sharded:
        return "parameters replicated"
    regathered = any(p.regathered for p in plan.parameters)
    how = "sharded and regathered" if regathered else "sharded"
    if not whole:
        return f"all parameters {how}"
    names = sorted(sharded, key=lambda name: -sharded[name])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} {how}"


def _recomputed(plan: Plan) -> list[str]:
    segments = {op.segment for op in plan.ops} - {0}
    return [f"{len(segments)} segment{'s' * (len(segments) > 1)} recomputed"] if segments else []
