"""Summarises a plan in one line: its headline, the split of every mesh axis and of parameters."""

from __future__ import annotations

from collections import defaultdict

from shardwright.ir.plan import Plan, PlannedOp
from shardwright.report.headline import headline

_SHOWN = 4  # most module names in one line
_ALL, _NONE = 0.995, 0.05  # shares of the compute time that are reported as all and nothing
LEGEND = (
    "splits X (n%): X is split in n % of the compute time, the rest is repeated along that axis"
)


def summary(plan: Plan) -> str:
    """A summary of a plan in one line, such as "FSDP 2: dp=2 splits batch; wte sharded"."""
    axes = [
        f"{name}={size} splits {split_along(plan, axis)}"
        for axis, (name, size) in enumerate(plan.layout_mesh.axes)
        if size > 1
    ]
    if plan.devices == 1:
        return headline(plan)
    return f"{headline(plan)}: {'; '.join([*axes, _parameters(plan)])}"


def shares_nothing(plan: Plan) -> bool:
    """Whether several devices each compute everything and hold all parameters."""
    axes = [axis for axis, (_, size) in enumerate(plan.layout_mesh.axes) if size > 1]
    whole = all(split_along(plan, axis) == "nothing" for axis in axes)
    replicated = all(parameter.layout.is_replicated for parameter in plan.parameters)
    return plan.devices > 1 and plan.stages == 1 and whole and replicated


def split_along(plan: Plan, axis: int) -> str:
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
