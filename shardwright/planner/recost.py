"""Prices an edited plan, or a plan on another machine.

The decisions of the plan are pinned, and the remaining space of one assignment is priced like any
other. So an unedited plan of the search gets the same cost as in the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Layout, Partial, Seconds, fits
from shardwright.ir.options.optimizers import placed
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.plan import Plan, PlanError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.micro_batch_counts import MicroBatchCounts
from shardwright.planner.pipeline.cuts import StageCuts
from shardwright.planner.pipeline.stage_assignment import Pipelines
from shardwright.planner.pipeline.stage_costs import Offer
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.space.checkpoint_segments import checkpoint_segments
from shardwright.planner.space.repeats import ShortGraph, find_repeats
from shardwright.planner.space.space import Space, make_space
from shardwright.planner.strategies.layers import layers_of
from shardwright.planner.strategies.preference import is_strategy
from shardwright.planner.strategies.recomputation import Recomputable, recomputable_by
from shardwright.planner.tables.layout_codes import digit, encode
from shardwright.planner.tables.memory import bucket_sizes
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed, Only
from shardwright.planner.tables.pricing import Pricing
from shardwright.program.decisions import Decisions
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.placements import feasible, layouts_under, tiling_text
from shardwright.simulate.time.stragglers import skewed, stretch
from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import Assignment, Point


def recosted(plan: Plan, graph: Graph, machine: Machine, optimizer: str, found: Frontier) -> Plan:
    """The decisions of `plan` with the costs of `machine` and the lower bound of `found`.

    Layouts, seconds, bytes and collectives are computed again from the plan's tilings, storage,
    recomputed segments, micro-batches, stages and schedule. Time and memory of a step are simulated
    again.

    Raises:
        PlanError: a decision is impossible (the message names the operator, the parameter or the
            cut), the mesh of the plan does not have the devices of `machine`, or `machine` has no
            link to the host that the plan offloads to.
    """
    analysis = analyze(graph)
    costed = additive(plan, graph, analysis, machine, optimizer, found)
    decisions = read_plan(plan, graph, analysis)
    lowering = PlanLowering(graph, analysis, decisions, machine.backend_spec.alone_bytes)
    return found.settled(TimeRefinement(graph, machine).refined(costed, lowering))


def additive(
    plan: Plan,
    graph: Graph,
    analysis: Analysis,
    machine: Machine,
    optimizer: str,
    found: Frontier,
) -> Plan:
    """The decisions of `plan` with additive costs on `machine`; its step is not simulated.

    Raises:
        PlanError: as `recosted`.
    """
    if plan.mesh.size != machine.devices:
        raise PlanError(
            f"the plan is for {plan.mesh.size} devices, {machine.name} has {machine.devices}; edit"
            " its mesh or take another machine"
        )
    if plan.offload and machine.device.host_bytes_per_s is None:
        raise PlanError(
            f"the plan offloads {', '.join(plan.offload)}, and {machine.name} has no"
            " host_bandwidth; give it, or take the plan's offload out"
        )
    decisions = read_plan(plan, graph, analysis)
    optimizer = placed(optimizer, plan.offload)
    model = _model(plan, (graph, analysis), machine, optimizer, decisions)
    possible = _recomputable(plan, graph, decisions.segments)
    skeleton = replace(possible.skeleton, kept=decisions.kept)
    again = any(decisions.segments.values())
    space = make_space(model, possible.segments if again else (), skeleton)
    point = PriceList.of(space.folded).point(_assignment(space, decisions))
    writer = PlanBuilder(space, graph, ShortGraph(graph, (), (), {}, {}), optimizer)
    if plan.pipeline is None:
        (peak,) = writer.peaks([point])
        candidate = Candidate(point, peak, writer, plan.name, plan.notes)
    else:
        candidate = _pipelined(plan, plan.pipeline, point, writer)
    return replace(
        candidate.plan(found.bound(candidate.peak), ()),
        ahead=plan.ahead,
        separates_gathers=plan.separates_gathers,
        async_tp=plan.async_tp,
        ep_overlap=plan.ep_overlap,
        offload=plan.offload,
        on_device=plan.on_device,
        update_group_bytes=plan.update_group_bytes,
    )


def operator_seconds(plan: Plan, graph: Graph, analysis: Analysis, machine: Machine) -> Seconds:
    """The seconds of all operators of `plan` on `machine`, as those of `additive` add up.

    Those of one kind are priced once, and no plan is built.
    """
    decisions, optimizer = read_plan(plan, graph, analysis), placed(plan.optimizer, plan.offload)
    model = _model(plan, (graph, analysis), machine, optimizer, decisions)
    again = frozenset(op.name for op in plan.ops if op.runs_again)
    total = 0.0
    for op in model.graph.ops:
        total += float(model.operator(op, again).seconds[0])
        total -= sum(t.seconds for t in model.internal_transfers(op, 0, op.name in again))
    return Seconds(total)


def with_internal_transfers(plan: Plan, graph: Graph, analysis: Analysis, machine: Machine) -> Plan:
    """`plan` with the seconds that transfers within its operators take on `machine`.

    Simulation prices all other transfers itself.
    """
    decisions, optimizer = read_plan(plan, graph, analysis), placed(plan.optimizer, plan.offload)
    model = _model(plan, (graph, analysis), machine, optimizer, decisions)
    again = frozenset(op.name for op in plan.ops if op.runs_again)
    seconds = {
        (t.value, t.consumer, t.phase, t.collectives): t.seconds
        for op in model.graph.ops
        for t in model.internal_transfers(op, 0, op.name in again)
    }
    return replace(
        plan,
        transfers=tuple(
            replace(
                t, seconds=seconds.get((t.value, t.consumer, t.phase, t.collectives), t.seconds)
            )
            for t in plan.transfers
        ),
    )


def _model(
    plan: Plan,
    form: tuple[Graph, Analysis],
    machine: Machine,
    optimizer: str,
    decisions: Decisions,
) -> CostModel:
    """The costs of the decisions of `plan`, each of which is the only choice."""
    graph, analysis = form
    sized_graph, sized = MicroBatchCounts(graph, analysis).analyzed(decisions.micro_batches)
    staged = plan.pipeline is not None
    parts = decisions.mesh.size * decisions.micro_batches
    return CostModel(
        sized_graph,
        sized,
        skewed(machine, lambda: stretch(graph, analysis, machine), parts, whole=staged),
        decisions.mesh,
        Pricing(
            optimizer,
            None,
            decisions.micro_batches,
            bucket_sizes(graph),
            decisions.gradient_sync,
            plan.compiled,
        ),
        Allowed(_operators(decisions, sized_graph, sized), _parameters(decisions, sized)),
    )


def _pipelined(plan: Plan, pipeline: Pipeline, point: Point, writer: PlanBuilder) -> Candidate:
    """The stages of `plan`, whose other decisions are those of `point`."""
    graph = writer.graph
    place = {op.name: i for i, op in enumerate(graph.ops)}
    for cut in plan.cuts:
        if cut not in place:
            raise PlanError(
                f"a stage begins with {cut}, which is no operator; name one of the model"
            )
    cuts = [place[cut] for cut in plan.cuts]
    stage_cuts = StageCuts(graph)
    if reason := stage_cuts.refused(cuts):
        raise PlanError(f"{reason}; name operators in the order of the model, with layers between")
    each = pipeline.stages // pipeline.groups
    given = stage_cuts, pipeline.groups, pipeline.schedule, each
    pipelines = Pipelines(Offer(writer, ()), *given)
    found = pipelines.priced(point.choice, cuts)
    if found is None:
        raise PlanError(
            f"a value between the stages that begin with {', '.join(plan.cuts)} has no layout that"
            " both sides have; give operators on both sides the same tiling, or cut elsewhere"
        )
    memory = partial(pipelines.memory, found)
    return Candidate(
        found.point, found.peak, writer, plan.name, plan.notes, staged=found, memory=memory
    )


def _recomputable(plan: Plan, graph: Graph, segments: Mapping[str, int]) -> Recomputable:
    """The segments that the strategy of a plan, or its search, may recompute."""
    repeats = tuple(find_repeats(graph))
    if is_strategy(plan):
        layers = layers_of(graph, repeats)
        return recomputable_by(Strategy.parse(plan.name).recompute, graph, layers)
    whole = checkpoint_segments(graph, repeats)
    parts = checkpoint_segments(graph, repeats, parts=True)

    def number(part: range) -> int:
        return max(segments.get(graph.ops[i].name, 0) for i in part)

    for one in whole:
        if len({number(part) for part in parts if part.start in one}) > 1:
            return Recomputable(parts)
    return Recomputable(whole)


def _operators(decisions: Decisions, graph: Graph, analysis: Analysis) -> dict[str, Only]:
    """For every operator its one choice, as indices into its rule's choices."""
    found: dict[str, Only] = {}
    for op in graph.ops:
        rule, tiling = analysis.rules[op.name], decisions.tilings[op.name]
        if not feasible(rule, layouts_under(rule, tiling, decisions.mesh)):
            words = " ".join(tiling_text(tiling))
            raise PlanError(
                f"operator {op.name} ({op.source}): tiling {words!r} on {decisions.mesh} leaves a"
                " device without a part; take another factor, or '-' for all of it everywhere"
            )
        known = rule.choices()
        found[op.name] = tuple(frozenset({known.index(choice)}) for choice in tiling)
    return found


def _parameters(decisions: Decisions, analysis: Analysis) -> dict[str, Only]:
    """For every parameter its one layout, by digits."""
    found: dict[str, Only] = {}
    for name, layout in decisions.storage.items():
        atoms = analysis.atoms[name]
        if not fits(atoms, layout) or any(isinstance(p, Partial) for p in layout.placements):
            raise PlanError(
                f"parameter {name} cannot be stored {layout}: its sizes are {_sizes(atoms)}; shard"
                " a dimension that leaves every device a part, as S(0), or write R"
            )
        counts = [len(sizes) for sizes in atoms]
        found[name] = tuple(frozenset({digit(p, counts)}) for p in layout.placements)
    return found


def _sizes(atoms: tuple[tuple[int, ...], ...]) -> str:
    return "x".join("*".join(map(str, sizes)) or "1" for sizes in atoms) or "those of a number"


def _assignment(space: Space, decisions: Decisions) -> Assignment:
    """The assignment of a space whose only free choices are recomputation and regathering."""
    storage = {
        leaf.name: stored.find(
            _code(decisions.storage[leaf.name], leaf.name, space.model.analysis),
            regathered=leaf.name in decisions.regathered,
        )
        for leaf, stored in zip(space.parameters, space.stored, strict=True)
    }
    choice = list(space.assignment(dict.fromkeys(space.op_nodes, 0), storage))
    for segment in _recomputed_segments(space, decisions):
        choice[space.recompute_choice.switches[segment]] = 1
        for node, twin in space.recompute_choice.twins.items():
            if space.segment_of[node] == segment:
                choice[node], choice[twin] = choice[twin], choice[node]
        for kept, keep in zip(space.kept_operators, space.recompute_choice.keeps, strict=True):
            choice[keep] |= int(space.segment_of[kept.choice.node] == segment)
    return tuple(choice)


def _code(layout: Layout, name: str, analysis: Analysis) -> int:
    return encode(layout, analysis.atoms[name])


def _recomputed_segments(space: Space, decisions: Decisions) -> set[int]:
    """The segments that are recomputed; raises `PlanError` if only a part of one is."""
    known = {
        name: space.segment_of[node]
        for name, op_node in space.op_nodes.items()
        if (node := op_node.node) is not None and node in space.segment_of
    }
    again = {name for name, n in decisions.segments.items() if n}
    again -= decisions.kept - known.keys()  # these are in no segment, and run once anyway
    if odd := sorted(again - known.keys()):
        raise PlanError(f"operator {odd[0]} cannot be recomputed; write 0 as its segment")
    found = {known[name] for name in again}
    for name, segment in known.items():
        if segment in found and name not in again:
            other = next(other for other in sorted(again) if known[other] == segment)
            raise PlanError(
                f"operators {other} and {name} are recomputed together or not at all; give both a"
                " segment, or neither"
            )
    return found
