"""Transfers a plan to other graphs of the model: other batch shapes, and evaluation.

Most planned operators have a counterpart in such a graph, which is split as planned, or computed by
all devices if the split would leave a device without work. Operators without a planned counterpart
follow the layouts of their operands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.ir.graph import OPAQUE, Graph, LeafKind, Op
from shardwright.ir.layout import Bytes, Layout, Mesh, Seconds, is_natural, with_atoms
from shardwright.ir.plan import Plan, PlanError, PlannedOp, PlannedParameter
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.micro_batches import MicroBatchError
from shardwright.rules.micro_batches import micro_batches as micro_batched
from shardwright.rules.placements import feasible, layouts_under, parse_tiling, tiling_text
from shardwright.rules.rule import Choice, Rule
from shardwright.tracing.call import flatten, split_call
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.graph_builder import DROPOUT

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of a call's tensors, by path


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """Shapes of the tensors of a call."""
    leaves = flatten(args, kwargs).items()
    return tuple((key, tuple(v.shape)) for key, v in leaves if isinstance(v, torch.Tensor))


def shapes_text(shapes: Shapes) -> str:
    """Shapes by their paths."""
    return ", ".join(f"{key} {list(shape)}" for key, shape in shapes)


def plan_for_shapes(
    model: nn.Module, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Plan:
    """`plan` for a call of `model` with other shapes; raises `PlanError` if that is another graph.

    Its costs remain those of the shapes that it was made for.
    """
    graph = capture_with_rules(model, args, kwargs, plan.numerics).graph
    if {op.name for op in graph.ops} != {op.name for op in plan.ops}:
        raise PlanError(
            f"the model does other things with a batch of {shapes_text(shapes_of(args, kwargs))}"
            " than with the one that was planned for; give batches of the planned shape"
        )
    analysis = analyze(graph)
    ops = tuple(_feasible(op, analysis.rules[op.name], plan.layout_mesh) for op in plan.ops)
    return _of_graph(plan, graph, analysis, args, kwargs, ops)


def plan_for_graph(
    plan: Plan,
    graph: Graph,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    recomputed: bool = False,
) -> Plan:
    """`plan` for `graph`, which is the same call in another mode, or with other outputs.

    Nothing is recomputed or gathered again unless asked for. Raises `PlanError` where the graph
    cannot run in the plan's stages, or needs parameters that the plan's does not.
    """
    analysis, mesh = analyze(graph), plan.layout_mesh
    known = _matched(graph.ops, plan.ops)
    stored: dict[str, Layout] = {}  # values that operators make
    ops = []
    for op in graph.ops:
        rule = analysis.rules[op.name]
        if (namesake := known.get(op.name)) is None:
            found = _planned(op, _agreeing(op, rule, stored, mesh), mesh)
        else:
            segment = namesake.segment if recomputed else 0
            found = replace(namesake, name=op.name, segment=segment)
        found = _feasible(found, rule, mesh)
        results = layouts_under(rule, parse_tiling(rule, found.tiling), mesh).results
        stored.update(zip(op.outputs, results, strict=True))
        ops.append(replace(found, layout=results[0]))
    here = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    parameters = tuple(
        replace(p, regathered=p.regathered and recomputed)
        for p in plan.parameters
        if p.name in here
    )
    changed = replace(plan, parameters=parameters, cuts=_cuts(plan, known))
    return _of_graph(changed, graph, analysis, args, kwargs, tuple(ops))


def with_last(graph: Graph, outputs: Iterable[str]) -> Graph:
    """`graph` with the operators that `outputs` and buffers do not need moved to the end."""
    needed = {*outputs, *(value for _, value in graph.updates)}
    first: list[Op] = []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            needed.update(op.operands)
            first.insert(0, op)
    names = {op.name for op in first}
    last = (op for op in graph.ops if op.name not in names)
    return replace(graph, ops=(*first, *last))


def _of_graph(
    plan: Plan,
    graph: Graph,
    analysis: Analysis,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ops: tuple[PlannedOp, ...],
) -> Plan:
    """`plan` for `graph`, in as many micro-batches, or in one where that is not possible."""
    count = plan.micro_batches
    try:
        if count > 1:
            micro_batched(graph, analysis, count)
    except MicroBatchError:
        count = 1
    tensors, constants = split_call(args, kwargs)
    inputs = tuple(replace(spec, shape=tuple(tensors[spec.key].shape)) for spec in plan.inputs)
    return replace(
        plan,
        fingerprint=graph.fingerprint,
        inputs=inputs,
        constants=tuple(constants.items()),
        ops=ops,
        parameters=tuple(_stored(one, analysis, args, kwargs) for one in plan.parameters),
        micro_batches=count,
    )


def _stored(
    one: PlannedParameter, analysis: Analysis, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> PlannedParameter:
    """The same stored layout of a parameter, expressed in its atoms in this graph."""
    atoms = analysis.atoms.get(one.name)
    if atoms is None:
        return one
    layout = with_atoms(one.layout, atoms)
    if not is_natural(atoms, layout):
        raise PlanError(
            f"with a batch of {shapes_text(shapes_of(args, kwargs))} the model takes {one.name}"
            f" apart in another way ({atoms}), which does not go with how it is stored"
            f" ({one.layout}); give batches of the planned shape"
        )
    return one if layout == one.layout else replace(one, layout=layout)


def _feasible(op: PlannedOp, rule: Rule, mesh: Mesh) -> PlannedOp:
    """`op` without splits along axes on which a device would get an empty tile."""
    known = {tiling_text((choice,))[0] for choice in rule.choices()}
    words = [word if word in known else "-" for word in op.tiling]  # of size 1: not split at all
    for axis in reversed(range(len(words))):
        if feasible(rule, layouts_under(rule, parse_tiling(rule, tuple(words)), mesh)):
            break
        words[axis] = "-"
    return op if tuple(words) == op.tiling else replace(op, tiling=tuple(words))


def same_without_dropout(trained: Graph, evaluated: Graph) -> bool:
    """Whether training runs the same operators as evaluation, in the same order, except dropout.

    Constants and opaque modules cannot be compared: graphs with any count as different.
    """
    if trained.updates or trained.leaves_of(LeafKind.CONSTANT):
        return False
    if any(op.target in (DROPOUT, OPAQUE) for op in evaluated.ops):
        return False
    return _calls(trained) == _calls(evaluated)


def _calls(graph: Graph) -> list[tuple[object, ...]]:
    """Operators in order without dropout; values are named by the number of what makes them."""
    names = {leaf.name: leaf.name for leaf in graph.leaves}
    found: list[tuple[object, ...]] = []
    for op in graph.ops:
        if op.target in (DROPOUT, "aten.clone.default"):  # which is what export makes of dropout
            names[op.outputs[0]] = names[op.operands[0]]
            continue
        called = op.with_operands([names[name] for name in op.operands])
        names.update((name, f"{len(found)}.{i}") for i, name in enumerate(op.outputs))
        found.append((op.target, called.args, called.kwargs))
    return [*found, tuple(names[name] for name in graph.outputs)]


def _matched(ops: Iterable[Op], planned: Iterable[PlannedOp]) -> dict[str, PlannedOp]:
    """The planned counterpart of each operator for which it is certain.

    Operators of one module and one kind correspond in order if their numbers are equal.
    """
    mine: dict[tuple[str, str], list[str]] = defaultdict(list)
    theirs: dict[tuple[str, str], list[PlannedOp]] = defaultdict(list)
    for op in ops:
        mine[op.source.module, op.target].append(op.name)
    for one in planned:
        theirs[one.source.module, one.target].append(one)
    return {
        name: one
        for key, names in mine.items()
        if len(names) == len(theirs[key])
        for name, one in zip(names, theirs[key], strict=True)
    }


def _agreeing(op: Op, rule: Rule, stored: Mapping[str, Layout], mesh: Mesh) -> tuple[str, ...]:
    """The tiling that, on each axis, leaves most elements of the operands of `op` in place."""
    sizes = {}
    for name, dims in zip(op.operands, rule.operands, strict=True):
        count = 1
        for size in (size for sizes_of in rule.atoms(dims) for size in sizes_of):
            count *= size
        sizes[name] = count

    def settled(axis: int) -> Choice:
        def stays(choice: Choice) -> int:
            wanted = zip(op.operands, rule.axis_placements(choice).operands, strict=True)
            return sum(
                sizes[name]
                for name, placement in wanted
                if name in stored and stored[name].placements[axis] == placement
            )

        return max(rule.choices(), key=stays)  # of equals the first, which splits nothing

    return tiling_text(tuple(settled(axis) for axis in range(len(mesh.axes))))


def _planned(op: Op, tiling: tuple[str, ...], mesh: Mesh) -> PlannedOp:
    """An operator that nothing was planned for."""
    return PlannedOp(
        op.name,
        op.target,
        op.source,
        tiling,
        splits=("-",) * len(tiling),
        layout=Layout.replicated(mesh),
        seconds=Seconds(0.0),
        saved_bytes=Bytes(0),
    )


def _cuts(plan: Plan, known: Mapping[str, PlannedOp]) -> tuple[str, ...]:
    """The first operators of the stages: the planned ones, or the next ones in this graph."""
    if not plan.cuts:
        return ()
    here = {one.name: name for name, one in known.items()}
    order = [op.name for op in plan.ops]
    found = []
    for cut in plan.cuts:
        after = order[order.index(cut) :]
        begins = next((here[name] for name in after if name in here), None)
        if begins is None:
            raise PlanError(
                "in this mode (train or eval) the model has nothing of what the stage that begins"
                f" with {cut} computes, so it cannot run in the plan's stages; plan without"
                " --stages, or evaluate what is saved"
            )
        found.append(begins)
    return tuple(found)
