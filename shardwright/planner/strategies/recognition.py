"""Finds the uniform strategy that is nearest to a plan's decisions."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.ir.layout import Shard
from shardwright.ir.plan import Plan
from shardwright.ir.schedules.registry import schedule_named
from shardwright.ir.strategy.fields import AXES, COMPILES
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute, StrategyError, op_word
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.axes.plan_roles import AxisUse, axis_uses, dimension_of

_LAYER = re.compile(r"(.*?\.)?\d+(?=\.|$)")


def strategy_of(plan: Plan) -> Strategy | None:
    """The uniform strategy that is nearest to a plan; None if there is none for its devices.

    Every mesh axis gets the role that most of its compute time has, and the strategy recomputes
    layers as most of them are. A plan that was priced from a strategy returns that strategy. For
    any other plan, price the result and compare with `same_decisions` to see if it is exact.
    """
    found = _of_name(plan)
    if found is not None:
        return found
    if plan.schedule != "none" and schedule_named(plan.schedule).asynchronous:
        return None
    uses = axis_uses(plan)
    roles = _roles(plan, uses)
    degrees = Counter(dict.fromkeys(AXES, 1))
    for role, size in roles:
        degrees[role] *= size
    fields: dict[str, Any] = {**degrees, "order": _order([role for role, _ in roles])}
    experts = [size for use, size in zip(uses, plan.layout_mesh.shape, strict=True) if use.experts]
    fields["ep"] = _product(experts)
    fields |= _storage(plan, [role for role, _ in roles if role != "pp"])
    fields |= _splits_of_sequence(plan, uses, [role for role, _ in roles if role != "pp"])
    fields |= {"micro_batches": plan.micro_batches, "recompute": _recompute(plan)}
    fields["gradient_sync"] = plan.gradient_sync
    fields["compile"] = COMPILES[plan.compiled]
    fields["offload"] = plan.offload
    fields |= {"async_tp": plan.async_tp, "ep_overlap": plan.ep_overlap}
    if plan.schedule != "none":
        fields["schedule"] = plan.schedule
        fields["virtual_stages"] = plan.stages // degrees["pp"]
        fields["stage_cut"] = _stage_cut(plan)
    try:
        return Strategy(**fields).in_form(plan.numerics)
    except StrategyError:
        return None


def same_decisions(plan: Plan, other: Plan) -> bool:
    """Whether two plans of one graph make the same decisions, so that ranks run the same steps."""
    return _decisions(plan) == _decisions(other)


def _decisions(plan: Plan) -> object:
    stored = {p.name: (p.layout.placements, p.regathered) for p in plan.parameters}
    computed = {op.name: (op.tiling, op.runs_again) for op in plan.ops}
    pipeline = plan.cuts, plan.schedule, plan.stages, plan.micro_batches
    options = plan.gradient_sync, plan.compiled, plan.offload, plan.on_device
    return plan.layout_mesh.shape, plan.stage_ranks, pipeline, options, stored, computed


def _of_name(plan: Plan) -> Strategy | None:
    """The strategy whose text is the plan's name."""
    try:
        found = Strategy.parse(plan.name)
    except StrategyError:
        return None
    fits = found.devices == plan.devices and found.micro_batches == plan.micro_batches
    return found if fits else None


def _roles(plan: Plan, uses: Sequence[AxisUse]) -> list[tuple[str, int]]:
    """The mesh axes, outer to inner, each with its role among the fields of a strategy."""
    inside = iter(uses)
    found = []
    for name, size in plan.mesh.axes:
        staged = plan.schedule != "none" and name == "pp"
        role = "pp" if staged else next(inside).main_role
        if size > 1:
            found.append((_dense(role), size))
    return found


def _dense(role: str) -> str:
    return "dp_shard" if role == "ep" else role


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def _order(roles: Sequence[str]) -> tuple[str, ...]:
    """The roles in the plan's order; roles without an axis keep their default positions."""
    named = list(dict.fromkeys(roles))
    if named == [axis for axis in AXES if axis in named]:
        return AXES
    left = iter(named)
    return tuple(next(left) if axis in named else axis for axis in AXES)


def _storage(plan: Plan, roles: Sequence[str]) -> Mapping[str, object]:
    """`zero` and `reshard_after_forward`."""
    axes = [n for n, role in enumerate(roles) if role in ("dp_shard", "cp")]
    sizes = [n for n, (_, size) in enumerate(plan.layout_mesh.axes) if size > 1]
    sharded = regathered = whole = 0
    for parameter in plan.parameters:
        placements = [parameter.layout.placements[sizes[axis]] for axis in axes]
        if any(isinstance(one, Shard) for one in placements):
            sharded += parameter.bytes
            regathered += parameter.bytes * parameter.regathered
        else:
            whole += parameter.bytes
    if not axes:
        return {}
    if sharded <= whole:
        return {"zero": 0}
    again = 2 * regathered > sharded
    default = plan.schedule == "none"
    return {} if again == default else {"reshard_after_forward": again}


def _splits_of_sequence(
    plan: Plan, uses: Sequence[AxisUse], roles: Sequence[str]
) -> Mapping[str, object]:
    """`sequence_parallel` and `cp_style`."""
    sizes = [n for n, (_, size) in enumerate(plan.layout_mesh.axes) if size > 1]
    found: dict[str, object] = {}
    tensor = [sizes[n] for n, role in enumerate(roles) if role == "tp"]
    if tensor and not any(uses[axis].sequence for axis in tensor):
        found["sequence_parallel"] = False
    styles = Counter[str]()
    for axis in (sizes[n] for n, role in enumerate(roles) if role == "cp"):
        for op in plan.ops:
            if "attention" not in op.target:
                continue
            if dimension_of(op, axis) == "features":
                styles["ulysses"] += 1
            else:
                ring = "(ring)" in op.splits[axis]
                styles["ring-zigzag" if ring else "all-gather"] += 1
    if styles:
        found["cp_style"] = styles.most_common(1)[0][0]
    return found


def layers_of_plan(plan: Plan) -> dict[str, list[int]]:
    """Operator indices of the outermost numbered modules (layers), by module path."""
    found: dict[str, list[int]] = {}
    for number, op in enumerate(plan.ops):
        match = _LAYER.match(op.source.module)
        if match is not None:
            found.setdefault(match[0], []).append(number)
    return found


def _recompute(plan: Plan) -> Recompute:
    """The `Recompute` that is nearest to the recomputed layers of a plan."""
    again = [
        2 * sum(plan.ops[i].segment > 0 for i in numbers) > len(numbers)
        for numbers in layers_of_plan(plan).values()
    ]
    count = sum(again)
    if not count:
        return NONE
    if all(again):
        return _all_but(plan)
    for step in range(2, len(again) + 1):
        if again == [(n + 1) % step == 0 for n in range(len(again))]:
            return Recompute("every", step)
    if plan.schedule == "none" and again == sorted(again, reverse=True):
        return Recompute("first", count)
    step = max(1, round(len(again) / count))
    return Recompute("every", step) if step > 1 else FULL


def _all_but(plan: Plan) -> Recompute:
    """`full`, or `ops` if every layer keeps all operators of some names and no other."""
    pairs = [(op_word(op.kind), op) for op in plan.ops if op.segment]
    kept = dict.fromkeys(name for name, op in pairs if op.kept and op.seconds)
    whole = all(op.kept for name, op in pairs if name in kept)
    return Recompute("ops", names=tuple(kept)) if kept and whole else FULL


def _stage_cut(plan: Plan) -> tuple[int, ...] | None:
    """The number of layers of each stage; None if a stage does not begin with a layer."""
    place = {op.name: number for number, op in enumerate(plan.ops)}
    starts = [numbers[0] for numbers in layers_of_plan(plan).values()]
    cuts = [place[name] for name in plan.cuts]
    if not set(cuts) <= set(starts):
        return None
    numbers = [0, *(starts.index(cut) for cut in cuts), len(starts)]
    return tuple(after - before for before, after in itertools.pairwise(numbers))
