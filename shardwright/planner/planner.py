"""The search over meshes: spaces, frontiers, baselines and their plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from shardwright.ir.constraints import Constraint, ConstraintError
from shardwright.ir.frontier import Plans
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.plan import Plan
from shardwright.ir.plan_options import OptionsError, PlanOptions
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.model import Machine
from shardwright.planner.arguments import Asked, asked_of, require_graph
from shardwright.planner.gc_pause import paused
from shardwright.planner.kcut_plan import kcut_frontier
from shardwright.planner.mesh_loop import RESOLUTION, Candidate, MeshLoop
from shardwright.planner.meshes import mesh_of_cuts, meshes_of
from shardwright.planner.micro_batch_counts import if_tight
from shardwright.planner.permitted import refuse
from shardwright.planner.pipeline.pipeline_search import PipelineSearch
from shardwright.planner.plans.memory_refinement import MemoryRefinement
from shardwright.planner.plans.off_frontier import OffFrontierPlans
from shardwright.planner.plans.refinement import Refinement
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.plans.time_refinement import TimeRefinement
from shardwright.planner.settle import settled
from shardwright.planner.space.constrain import Marks
from shardwright.planner.space_factory import SpaceFactory
from shardwright.program.lower.stages import needs_one_stage
from shardwright.rules.micro_batches import MicroBatchError
from shardwright.solve.frontier.frontier_sampling import spaced

Progress = Callable[[str, float], None]  # what is being done, which part of all is done

_PLANS = 48
_SHARE = 0.3  # of a search with pipelines is spent on plans without


@paused()
def search(
    graph: Graph,
    machine: Machine,
    options: PlanOptions,
    tracer: OpTracer,
    progress: Progress | None = None,
) -> SearchedFrontier:
    """The Pareto frontier of (step time, peak memory per rank) over all plans for `machine`.

    With the method "kcut" it is one plan instead, SoyBean's (`kcut.py`): the devices are cut by one
    prime factor after the other, or along the axes of the one mesh in `options`, so that the fewest
    bytes are communicated, whatever time and memory that takes. `shardwright.search` says what the
    method "joint" searches.

    Memory is settled with what `tracer` says of single operator calls.

    Raises `ConstraintError` for constraints that mean nothing here or that no plan can meet, and
    what `asked_of` raises.
    """
    require_graph(graph)
    if progress is not None and not callable(progress):
        raise OptionsError(f"progress is {progress!r}; give a function of a text and a number")
    asked = asked_of(machine, options)
    if options.method == "kcut":
        (mesh,) = options.meshes or (mesh_of_cuts(machine),)
        # Its neighbours on the page: the ends of the frontier, and the baselines.
        neighbours = PlanOptions(
            optimizer=options.optimizer, seconds=0, recompute=False, micro_batches=(1,)
        )
        ends = partial(search, graph, machine, neighbours, tracer)
        found = kcut_frontier(graph, machine, options.optimizer, mesh, tracer, ends, progress)
        return replace(found, device_bytes=machine.device.usable_bytes)
    marks = Marks.on(graph, options.constraints)
    sources = SpaceFactory(graph, marks, recompute=options.recompute)
    end, tell = time.perf_counter() + options.seconds, progress or _silent

    def run(micro_batches: tuple[int, ...] | str) -> SearchedFrontier:
        these = replace(options, micro_batches=micro_batches)
        start = time.perf_counter()
        rounds = _search(sources, machine, these, asked, end, tell)
        return _frontier_of(rounds, start, tracer)

    if options.micro_batches is None:
        return if_tight(run, options.memory_limit)
    return run(options.micro_batches)


def _search(
    sources: SpaceFactory,
    machine: Machine,
    options: PlanOptions,
    asked: Asked,
    end: float,
    tell: Progress,
) -> MeshLoop:
    """What is found with the numbers of micro-batches in `options`, up to the moment `end`."""
    wanted, groups = options.constraints, asked.groups
    counts, impossible = sources.possible(options.counts)
    if options.counts is not None and len(impossible) == len(set(options.counts)):
        raise MicroBatchError(f"{impossible[0]}; ask for other numbers, or for none")
    several = groups[groups[0] == 1 :]
    if several and (reason := needs_one_stage(sources.graph)):
        if 1 not in groups:
            raise PipelineError(reason)
        several, impossible = (), (*impossible, reason)
    rounds = MeshLoop(sources, machine, options, impossible)
    share = _SHARE if several else 1.0  # of the bar
    if 1 in groups:
        _search_meshes(rounds, asked.meshes, counts, end, _part(tell, 0.0, share))
    part = _part(tell, share, 1.0)
    PipelineSearch(rounds, asked.every, end, part).search(several)
    if not rounds.found:
        refuse(rounds.refused, machine.devices)
        raise PipelineError(
            f"there is no pipeline of {' or '.join(map(str, groups))} stages through this model;"
            " ask for fewer stages"
        )
    if wanted:
        free = SpaceFactory(sources.graph, recompute=False)
        known = (*(options.meshes or meshes_of(machine.devices)), *asked.meshes)
        for mesh in dict.fromkeys(known):
            rounds.compare(free, mesh, counts[0], sources.marks)
    tell("done", 1.0)
    return rounds


def _search_meshes(
    rounds: MeshLoop,
    meshes: Sequence[Mesh],
    counts: Sequence[int],
    end: float,
    tell: Progress,
) -> None:
    """Search every mesh with every number of micro-batches, or while more of them give anything."""
    while_useful, compare = rounds.options.counts is None, not rounds.options.constraints
    useful = counts[0]  # the last number of micro-batches that gave a plan
    turns = [(count, mesh) for count in counts for mesh in meshes]
    for i, (count, mesh) in enumerate(turns):
        if while_useful and count > 2 * useful:
            break
        best = f", best so far {rounds.best * 1e3:.1f} ms" if rounds.best is not None else ""
        pieces = f", {count} micro-batches" if count > 1 else ""
        tell(f"mesh {mesh}{pieces}{best}", i / len(turns))
        first = count == counts[0]
        try:
            if rounds.run(mesh, count, end - time.perf_counter(), compare=first and compare):
                useful = count
        except ConstraintError as e:
            if first:
                rounds.refuse(e)


def _part(tell: Progress, begin: float, end: float) -> Progress:
    """What tells of the part of a search between `begin` and `end`."""
    return lambda what, done: tell(what, begin + (end - begin) * done)


def _silent(_what: str, _done: float) -> None:
    """Nobody wants to know."""


def _frontier_of(rounds: MeshLoop, start: float, tracer: OpTracer) -> SearchedFrontier:
    """The plans worth showing; they are written when they are looked at."""
    wanted, optimizer = rounds.options.constraints, rounds.options.optimizer

    def write(candidate: Candidate) -> Plan:
        return candidate.plan(rounds.bound(candidate.peak), _said(wanted, candidate.broken))

    permitted = rounds.permitted
    every = [*rounds.found, *permitted]
    kept = spaced(every, [c.cost for c in every], _PLANS, RESOLUTION, [c.cost for c in permitted])
    shown = _first_of_each(rounds.known)
    plans, yardsticks = _plans(kept, write), _plans(shown, write)
    sources = rounds.sources
    given, analysis = (sources.graph, rounds.machine), sources.analysis
    refinement = Refinement(
        TimeRefinement(*given, analysis), MemoryRefinement(*given, optimizer, tracer, analysis)
    )
    if rounds.machine.settles:  # then times do not just add up
        kept = list({id(c): c for c in (*kept, *permitted)}.values())
        costs, written = settled(kept, write)
        thinned = spaced(list(zip(kept, costs, strict=True)), costs, _PLANS, 0.0)
        kept = [candidate for candidate, _ in thinned]
        plans = _settled(thinned, written)
        costs, written = settled(shown, write)
        yardsticks = _settled(list(zip(shown, costs, strict=True)), written)
    return SearchedFrontier(
        plans,
        yardsticks,
        search_seconds=time.perf_counter() - start,
        constraints=tuple(map(str, wanted)),
        broken={c.name: tuple(map(str, c.broken)) for c in shown if c.broken},
        settle=refinement.settled,
        least=lambda place: kept[place].least,
        off_frontier=OffFrontierPlans(every, write, refinement.settled).faster,
        device_bytes=rounds.machine.device.usable_bytes,
        hints=rounds.notes,
    )


def _said(wanted: Sequence[Constraint], broke: Sequence[Constraint]) -> tuple[str, ...]:
    """What a plan notes of the constraints."""
    if broke:
        return (f"breaks the constraints: {'; '.join(map(str, broke))}",)
    return (f"made under the constraints: {'; '.join(map(str, wanted))}",) if wanted else ()


def _plans(candidates: Sequence[Candidate], write: Callable[[Candidate], Plan]) -> Plans:
    return Plans([c.cost for c in candidates], lambda place: write(candidates[place]))


def _settled(
    found: Sequence[tuple[Candidate, tuple[Seconds, Bytes]]], written: Callable[[Candidate], Plan]
) -> Plans:
    return Plans([cost for _, cost in found], lambda place: written(found[place][0]))


def _first_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest candidate of each name, in order of first appearance; permitted ones first."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.name)
        if known is None or _rank(candidate) < _rank(known):
            best[candidate.name] = candidate
    return list(best.values())


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return bool(candidate.broken), candidate.point.time
