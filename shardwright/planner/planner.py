"""The search over meshes: spaces, frontiers, baselines and their plans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from shardwright.ir.constraints import Constraint, ConstraintError
from shardwright.ir.frontier import Frontier, Plans, parse_limit
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.optimizers import known_optimizer
from shardwright.ir.pipeline import PipelineError
from shardwright.ir.plan import Plan
from shardwright.machine.files import machine_of
from shardwright.machine.model import Machine
from shardwright.planner.arguments import Asked, MethodError, check_arguments, require_graph
from shardwright.planner.gc_pause import paused
from shardwright.planner.kcut_plan import kcut_frontier
from shardwright.planner.mesh_loop import RESOLUTION, Candidate, MeshLoop
from shardwright.planner.meshes import mesh_of_cuts, meshes_of
from shardwright.planner.micro_batch_counts import if_tight
from shardwright.planner.permitted import refuse
from shardwright.planner.pipeline.pipeline_search import PipelineSearch
from shardwright.planner.plans.memory_refinement import MemoryRefinement
from shardwright.planner.plans.off_frontier import OffFrontierPlans
from shardwright.planner.settle import settled
from shardwright.planner.space.constrain import Marks
from shardwright.planner.space_factory import SpaceFactory
from shardwright.program.lower.stages import needs_one_stage
from shardwright.rules.micro_batches import MicroBatchError
from shardwright.solve.frontier.frontier_sampling import thin

Progress = Callable[[str, float], None]  # what is being done, which part of all is done

_PLANS = 48
_SHARE = 0.3  # of a search with pipelines is spent on plans without


@paused()
def search(
    graph: Graph,
    machine: Machine | str,
    optimizer: object = "adamw",
    *,
    method: str = "joint",
    exact: bool = False,
    recompute: bool = True,
    meshes: Sequence[Mesh] | None = None,
    constraints: Sequence[str | Constraint] = (),
    micro_batches: Sequence[int] | str | None = None,
    memory_limit: str | int | None = None,
    stages: Sequence[int] | None = (1,),
    allow_async: bool = False,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> Frontier:
    """The Pareto frontier of (step time, peak memory per rank) over all plans for `machine`.

    With the method "kcut" it is one plan instead, SoyBean's (`kcut.py`): the devices are cut by one
    prime factor after the other, or along the axes of the one mesh in `meshes`, so that the fewest
    bytes are communicated, whatever time and memory that takes. What follows is about the method
    "joint".

    Every mesh of one and of two axes over all its devices is searched, unless
    `meshes` says which, with each number of `micro_batches`. None tries more than one where
    `memory_limit`, by default the memory of a device, makes plans slower or rules all out; "all"
    tries 2, 4, 8 and so on for as long as they save memory. With `stages` other than 1, devices
    form as many groups, and pipelines through them are searched as well
    (`pipelines.py`); None climbs to the best of 2, 4, 8 and so on. With `allow_async`
    so are asynchronous ones, a device a stage, which change the optimisation; if no stages are
    asked for, as for None.
    `constraints`, texts such as `pin layers.*.mlp=tp:features` (`ir/constraints.py`), leave out of
    it what they rule out; baselines that break one are shown
    and never chosen. With `recompute` pieces of the graph, such as layers, may keep nothing and run
    again in the backward pass. `exact` gives FT's exact frontier of the additive
    costs; without it the frontier's supported points are exact and what lies
    between them is a mixture, with a lower bound on the time of each plan.
    After `seconds` the meshes that are left have their ends and baselines only,
    and bounds that are not as tight, and pipelines that are left are not searched; the result then
    depends on this machine. A plan's bound is of the meshes, stages and micro-batches searched.

    `optimizer` is a name, a class of torch.optim, or one that was made.

    Raises `ConstraintError` for constraints that mean nothing here or that no plan can meet,
    `OptimizerError` for an optimizer that is not known, and what `check_arguments` raises.
    """
    require_graph(graph)
    if progress is not None and not callable(progress):
        raise MethodError(f"progress is {progress!r}; give a function of a text and a number")
    optimizer = known_optimizer(optimizer)
    machine = machine_of(machine)
    if memory_limit is not None:
        memory_limit = parse_limit(memory_limit)
    asked = check_arguments(
        machine,
        constraints,
        stages,
        meshes,
        method=method,
        exact=exact,
        recompute=recompute,
        micro_batches=micro_batches,
        allow_async=allow_async,
        seconds=seconds,
    )
    if method == "kcut":
        (mesh,) = meshes or (mesh_of_cuts(machine),)
        # Its neighbours on the page: the ends of the frontier, and the baselines.
        ends = partial(
            search, graph, machine, optimizer, seconds=0, recompute=False, micro_batches=(1,)
        )
        found = kcut_frontier(graph, machine, optimizer, mesh, ends, progress)
        return replace(found, device_bytes=machine.device.usable_bytes)
    sources = SpaceFactory(graph, Marks.on(graph, asked.wanted), recompute=recompute)
    end = time.perf_counter() + seconds

    def run(counts: Sequence[int] | None) -> Frontier:
        return _search(sources, machine, optimizer, exact, counts, asked, end, progress or _silent)

    if micro_batches is None:
        return if_tight(run, memory_limit)
    return run(None if isinstance(micro_batches, str) else micro_batches)


def _search(
    sources: SpaceFactory,
    machine: Machine,
    optimizer: str,
    exact: bool,
    micro_batches: Sequence[int] | None,
    asked: Asked,
    end: float,
    tell: Progress,
) -> Frontier:
    """The frontier with these numbers of micro-batches, all powers of two for None."""
    start = time.perf_counter()
    wanted, groups = asked.wanted, asked.groups
    counts, impossible = sources.possible(micro_batches)
    if micro_batches is not None and len(impossible) == len(set(micro_batches)):
        raise MicroBatchError(f"{impossible[0]}; ask for other numbers, or for none")
    several = groups[groups[0] == 1 :]
    if several and (reason := needs_one_stage(sources.graph)):
        if 1 not in groups:
            raise PipelineError(reason)
        several, impossible = (), (*impossible, reason)
    rounds = MeshLoop(sources, machine, optimizer, exact, impossible)
    share = _SHARE if several else 1.0  # of the bar
    if 1 in groups:
        part = _part(tell, 0.0, share)
        while_useful = micro_batches is None
        _search_meshes(rounds, asked.chosen, counts, while_useful, not wanted, end, part)
    part = _part(tell, share, 1.0)
    piping = PipelineSearch(
        rounds, wanted, micro_batches, asked.every, asked.allow_async, end, part
    )
    piping.search(several)
    if not rounds.found:
        refuse(rounds.refused, machine.devices)
        raise PipelineError(
            f"there is no pipeline of {' or '.join(map(str, groups))} stages through this model;"
            " ask for fewer stages"
        )
    if wanted:
        free = SpaceFactory(sources.graph, recompute=False)
        known = (*(asked.meshes or meshes_of(machine.devices)), *asked.chosen)
        for mesh in dict.fromkeys(known):
            rounds.compare(free, mesh, counts[0], wanted, sources.marks)
    tell("done", 1.0)
    return _frontier_of(rounds, wanted, start)


def _search_meshes(
    rounds: MeshLoop,
    meshes: Sequence[Mesh],
    counts: Sequence[int],
    while_useful: bool,
    compare: bool,
    end: float,
    tell: Progress,
) -> None:
    """Search every mesh with every number of micro-batches, or while more of them give anything."""
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


def _frontier_of(rounds: MeshLoop, wanted: Sequence[Constraint], start: float) -> Frontier:
    """The plans worth showing; they are written when they are looked at."""

    def write(candidate: Candidate) -> Plan:
        return candidate.plan(rounds.bound(candidate.peak), _said(wanted, candidate.broken))

    permitted = rounds.permitted
    every = [*rounds.found, *permitted]
    kept = thin(every, [c.cost for c in every], _PLANS, RESOLUTION, [c.cost for c in permitted])
    shown = _first_of_each(rounds.known)
    plans, yardsticks = _plans(kept, write), _plans(shown, write)
    sources = rounds.sources
    memories = MemoryRefinement(sources.graph, rounds.machine, rounds.optimizer, sources.analysis)
    if rounds.machine.settles:  # then times do not just add up
        kept = list({id(c): c for c in (*kept, *permitted)}.values())
        costs, written = settled(kept, write)
        thinned = thin(list(zip(kept, costs, strict=True)), costs, _PLANS, 0.0)
        kept = [candidate for candidate, _ in thinned]
        plans = _settled(thinned, written)
        costs, written = settled(shown, write)
        yardsticks = _settled(list(zip(shown, costs, strict=True)), written)
    return Frontier(
        plans,
        yardsticks,
        search_seconds=time.perf_counter() - start,
        constraints=tuple(map(str, wanted)),
        broken={c.name: tuple(map(str, c.broken)) for c in shown if c.broken},
        settle=memories.settled,
        least=lambda place: kept[place].least,
        overtaken=OffFrontierPlans(every, write, memories.settled).faster,
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
