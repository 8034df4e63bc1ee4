"""Decodes the decisions of a plan for the graph that it is used with."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Layout, fits, is_natural
from shardwright.ir.plan import Plan, PlanError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.program.decisions import Decisions
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatchError, SplitBatch
from shardwright.rules.micro_batches import micro_batches as micro_batched
from shardwright.rules.operators.fp8_layers import fp8_layers
from shardwright.rules.placements import parse_tiling
from shardwright.rules.rule import Tiling


def read_plan(
    plan: Plan, graph: Graph, analysis: Analysis, split: SplitBatch | None = None
) -> Decisions:
    """The decisions of a plan for `graph`; raises `PlanError` if the plan is of another graph.

    `split` cuts the batch, which takes a while; None computes it.
    """
    if plan.fingerprint != graph.fingerprint:
        raise PlanError(
            f"the plan was made for another model or other shapes (graph {plan.fingerprint}, this"
            f" one is {graph.fingerprint}); plan this model with this batch again"
        )
    _require_offload(plan, graph)
    if plan.separates_gathers and plan.is_asynchronous:
        raise PlanError(
            f"the plan separates gathers under schedule {plan.schedule}, and plans with weight"
            " versions have one communicator for each axis; take its separates_gathers out"
        )
    tilings: dict[str, Tiling] = {}
    parsed: dict[tuple[int, tuple[str, ...]], Tiling] = {}  # by the identity of the rule
    for op in plan.ops:
        if op.name not in analysis.rules:
            raise PlanError(f"the plan has the operator {op.name}, the model does not; plan again")
        try:
            rule = analysis.rules[op.name]
            key = id(rule), op.tiling
            if key not in parsed:
                parsed[key] = parse_tiling(rule, op.tiling)
            tilings[op.name] = parsed[key]
        except ValueError as e:
            raise PlanError(f"operator {op.name} ({op.source}): {e}") from e
    storage = {p.name: p.layout for p in plan.parameters}
    if missing := {op.name for op in graph.ops} - set(tilings):
        raise PlanError(f"the plan has no tiling for the operator {min(missing)}; plan again")
    _require_storage(storage, graph, analysis)
    try:
        if plan.pipeline is not None:
            plan.pipeline.check(plan.micro_batches)
        if plan.micro_batches > 1:
            split(plan.micro_batches) if split else micro_batched(
                graph, analysis, plan.micro_batches
            )
    except PipelineError as e:
        raise PlanError(f"the plan cannot run: {e}") from e
    except MicroBatchError as e:
        raise PlanError(f"the plan has {plan.micro_batches} micro-batches, but {e}") from e
    return Decisions(
        mesh=plan.layout_mesh,
        tilings=tilings,
        storage=storage,
        regathered=frozenset(p.name for p in plan.parameters if p.regathered),
        segments={op.name: op.segment for op in plan.ops},
        micro_batches=plan.micro_batches,
        pipeline=plan.pipeline,
        gradient_sync=plan.gradient_sync,
        kept=frozenset(op.name for op in plan.ops if op.kept),
        ahead=plan.ahead,
        offload=plan.offload,
        on_device=frozenset(plan.on_device),
        compiled=plan.compiled,
        update_group_bytes=plan.update_group_bytes,
        in_8_bit=frozenset(fp8_layers(graph)),
        separates_gathers=plan.separates_gathers,
        host_devices=plan.host_devices,
    )


def _require_storage(storage: Mapping[str, Layout], graph: Graph, analysis: Analysis) -> None:
    """Raise `PlanError` unless each parameter has a layout in which it can be stored."""
    parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    if parameters != set(storage):
        odd = min(parameters ^ set(storage))
        raise PlanError(f"plan and model disagree on the parameter {odd}; plan again")
    checked: set[object] = set()
    for name, layout in storage.items():
        atoms = analysis.atoms[name]
        if (atoms, layout) in checked:
            continue
        checked.add((atoms, layout))
        if fits(atoms, layout) and not is_natural(atoms, layout):
            raise PlanError(
                f"the plan stores the parameter {name} of shape {list(graph.tensor[name].shape)} as"
                f" {layout}, and parameters are sharded evenly along their own dimensions; plan"
                " again"
            )


def _require_offload(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` if a plan offloads what step programs do not."""
    if plan.offload and plan.is_asynchronous:
        raise PlanError(
            f"the plan offloads {', '.join(plan.offload)} under schedule {plan.schedule}, and plans"
            " with weight versions keep everything on the device; take its offload out"
        )
    if "parameters" not in plan.offload:
        return
    if plan.pipeline is not None:
        raise PlanError(
            "the plan keeps parameters on the host and has pipeline stages, which read theirs on"
            " the device; take one of both out"
        )
    parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    written = {buffer for buffer, _ in graph.updates}
    if odd := parameters & {*graph.outputs, *written}:
        raise PlanError(
            f"the plan keeps parameters on the host, and the model returns or writes {min(odd)}"
            " itself, on the device; take parameters out of its offload"
        )
