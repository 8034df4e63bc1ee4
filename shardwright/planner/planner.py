"""The search over meshes: spaces, frontiers, baselines and their plans."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from shardwright.ir.frontier import ENDED, Plans
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.constraints import Constraint, OnMesh
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.ir.options.plan_options import ALL, AUTO, OptionsError, PlanOptions
from shardwright.ir.plan import Plan
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.schedules.single_stage import GPIPE, ONE_F_ONE_B
from shardwright.machine.model import Machine
from shardwright.planner.arguments import SearchScope, require_graph, search_scope
from shardwright.planner.axes.axis_names import AxisNames
from shardwright.planner.deadline import ENDS, NEVER, Deadline, half_way
from shardwright.planner.gc_pause import paused
from shardwright.planner.kcut.frontier import kcut_frontier
from shardwright.planner.memory_limits import (
    forms_to_search,
    offload_of,
    optimizers_on_host,
)
from shardwright.planner.meshes.mesh_loop import GAIN, MeshLoop
from shardwright.planner.meshes.mesh_turns import Progress, given_names, search_meshes
from shardwright.planner.meshes.meshes import mesh_of_cuts, meshes_of
from shardwright.planner.permitted import refuse
from shardwright.planner.pipeline.pipeline_search import PipelineSearch
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.mesh_frontier import RESOLUTION
from shardwright.planner.plans.off_frontier import OffFrontierPlans
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.plans.simulated.refinements import Refinements
from shardwright.planner.processes.foresight import Foresight
from shardwright.planner.settle import settled
from shardwright.planner.slow_networks import Bound, with_slow_networks
from shardwright.planner.space.constrain import Marks
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.frontier.starting import StartingStrategies
from shardwright.planner.strategies.preference import is_strategy
from shardwright.planner.tight_memory import if_needed, if_tight
from shardwright.program.lower.stages import needs_one_stage
from shardwright.rules.micro_batches import MicroBatchError
from shardwright.solve.frontier.frontier_sampling import spaced

_MOST_EXACT = 96  # plans of an exact search, whose decisions are finer
_MOST_PIPELINES = 2  # of each kind, that may be simulated beside the frontier
_MOST_COUNTS = 4  # the most numbers of micro-batches that strategies try by default
_FIRST_SHARE = 0.1  # the fraction of the progress bar for strategies
_SHARE = 0.3  # the fraction of the progress bar for plans without pipelines


@paused()
def search(
    graph: Graph,
    machine: Machine,
    options: PlanOptions,
    tracer: OpTracer,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> SearchedFrontier:
    """The Pareto frontier of (step time, peak memory per rank) over all plans for `machine`.

    The method "kcut" returns SoyBean's plan alone (`kcut/cutter.py`): it cuts the devices by one
    prime factor after the other, or along the axes of the one mesh in `options`, and minimises the
    communicated bytes. `shardwright.search` describes the method "joint".

    Args:
        graph: the captured training step.
        machine: the devices and their links.
        options: the options of the search.
        tracer: traces the memory of single operator calls, for the simulation of memory.
        progress: called with the current task and the fraction of the search that is done, 0 to 1.
        deadline: when the search ends; by default after the `seconds` in `options`.

    Raises:
        ConstraintError: a constraint matches nothing, or no plan keeps all constraints.
        GraphError: `graph` is not a `Graph`.
        PipelineError, MicroBatchError: as in `search_scope`.
    """
    require_graph(graph)
    if progress is not None and not callable(progress):
        raise OptionsError(f"progress is {progress!r}; give a function of a text and a number")
    scope = search_scope(machine, options)
    if options.method == "kcut":
        return _cut(graph, machine, options, tracer, progress)
    until = deadline or Deadline.after(options.seconds)

    def joint(machine: Machine, known: Bound) -> SearchedFrontier:
        return _joint(graph, machine, options, scope, (tracer, until, progress, known))

    return with_slow_networks(joint, machine, options.memory_limit, until)


def _joint(
    graph: Graph,
    machine: Machine,
    options: PlanOptions,
    scope: SearchScope,
    given: tuple[OpTracer, Deadline, Progress | None, Bound],
) -> SearchedFrontier:
    """The frontier by the prices of `machine`, from a search that ends by a deadline."""
    tracer, deadline, progress, known = given
    notify = progress or _ignore_progress
    forms = forms_to_search(graph, machine, options)
    first = len(forms.plain)
    starts: list[StartingStrategies] = []
    for form in forms.every:
        other = starts[0].factory if starts else None
        starts.append(_start_of(form, machine, options, scope, other))
    loops: dict[tuple[int, object, bool, str], MeshLoop] = {}
    offload, on_host = offload_of(machine, options), optimizers_on_host(machine, options)
    first_way = 1 if options.offload and on_host else 0  # which is searched in any case
    refinements = Refinements(tracer)

    def run(*, tight: bool, ways: int = first_way) -> SearchedFrontier:
        """The frontier; what only saves memory is searched if `tight`, and `ways` of `on_host`."""
        start, found = time.perf_counter(), list[MeshLoop]()
        counts = options.micro_batches or (ALL if tight else (1,))
        host = tight if offload is None else offload
        these = replace(options, micro_batches=counts, offload=host)
        names = options.optimizer, *on_host[:ways]
        wanted = list(product(names, enumerate(starts if tight else starts[:first])))
        for place, (name, (number, one)) in enumerate(wanted):
            is_last = tight and place == len(wanted) - 1
            key = number, counts, host, name
            if key not in loops:
                same = (loops[k] for k in loops if (k[0], *k[2:]) == (number, host, name))
                end = deadline.tables if is_last else half_way(deadline.tables)
                given = (end, deadline), notify, (found, next(same, None))
                loops[key] = _search(
                    one.with_optimizer(name), replace(these, optimizer=name), *given
                )
            found.append(loops[key])
        return _frontier_of(found, start, refinements, known, deadline)

    saves = None in (options.micro_batches, offload) or (
        first < len(starts) and options.micro_batches != ALL
    )
    if saves and not options.whole:
        settled = if_tight(run, options.memory_limit, deadline)
    else:
        settled = run(tight=True)
    more = range(first_way + 1, len(on_host) + 1)
    return if_needed(run, settled, options.memory_limit, more)


def _cut(
    graph: Graph,
    machine: Machine,
    options: PlanOptions,
    tracer: OpTracer,
    progress: Progress | None,
) -> SearchedFrontier:
    """SoyBean's plan, with the ends of the frontier and the baselines for comparison."""
    (mesh,) = options.meshes or (mesh_of_cuts(machine),)
    baseline_options = PlanOptions(
        optimizer=options.optimizer,
        recompute=False,
        micro_batches=(1,),
        stages=(1,),
        loss_chunks=(1,),
        mlp_chunks=(1,),
    )
    ends = partial(search, graph, machine, baseline_options, tracer, deadline=ENDS)
    found = kcut_frontier(graph, machine, options.optimizer, mesh, tracer, ends, progress)
    return replace(found, device_bytes=machine.device.usable_bytes, deadline=NEVER)


def _start_of(
    graph: Graph,
    machine: Machine,
    options: PlanOptions,
    scope: SearchScope,
    other: SpaceFactory | None,
) -> StartingStrategies:
    marks = Marks.on(graph, options.constraints)
    factory = SpaceFactory(graph, marks, recompute=options.recompute, other=other)
    return StartingStrategies(factory, machine, options, scope)


def _search(
    strategies: StartingStrategies,
    options: PlanOptions,
    until: tuple[float, Deadline],
    notify: Progress,
    others: tuple[Sequence[MeshLoop], MeshLoop | None],
) -> MeshLoop:
    """Search with the numbers of micro-batches in `options`.

    It starts from `strategies`, which rule out meshes. `until` has the time when it ends to leave
    some for other forms of the graph, and the deadline of all, until which it goes on where a
    strategy fits. `others` are the searches of other forms, and one of this form in other numbers.
    """
    (end, deadline), (before, same) = until, others
    factory, machine, scope = strategies.factory, strategies.machine, strategies.scope
    groups = scope.groups
    counts, impossible = factory.possible(options.counts)
    if options.counts is not None and len(impossible) == len(set(options.counts)):
        raise MicroBatchError(f"{impossible[0]}; ask for other numbers, or for none")
    several = groups[groups[0] == 1 :]
    if optimizer_spec(options.optimizer).by_host:
        several = ()  # stages read their parameters on the device
    if several and (reason := needs_one_stage(factory.graph)):
        if 1 not in groups:
            raise PipelineError(reason)
        several = ()
        impossible = impossible if options.stages == AUTO else (*impossible, reason)
    loop = MeshLoop(factory, machine, options, impossible)
    loop.host = options.offload is True
    loop.made = {} if same is None else same.made
    loop.elsewhere = [c.cost for other in before for c in (*other.found, *other.permitted)]
    started: list[Candidate] = []
    tried = counts if options.counts is not None else counts[:_MOST_COUNTS]
    if strategies.are_wanted:
        notify("uniform strategies", 0.0)
        asked = (1, *several) if 1 in groups else several
        best_start = min((one.best_start for one in before), default=math.inf)
        without = (1,) if options.stages == AUTO else asked
        first_end = half_way(end)
        started = strategies.candidates(tried, without, best_start, first_end)
        loop.start_from(started)
        loop.is_cut = time.perf_counter() >= first_end
        end = deadline.tables if math.isfinite(loop.best_start) else end
        notify = _part(notify, _FIRST_SHARE, 1.0)
    share = _SHARE if several else 1.0  # of the progress bar
    if 1 in groups:
        part = _part(notify, 0.0, share)
        search_meshes(loop, scope.meshes, counts, end, part, skips=deadline.skips)
    part = _part(notify, share, 1.0)
    for one in strategies.around(started):
        if loop.found and time.perf_counter() >= end:
            break
        part(f"around the strategy {one.like}", 0.0)
        loop.run_around(one, end - time.perf_counter())
    if options.stages != AUTO:
        PipelineSearch(loop, scope.every, end, part).search(several)
    elif several and strategies.are_wanted:
        best = min(one.best_within_limit for one in (*before, loop))
        _add_pipelines(loop, strategies, (tried, several), best, end, part)
    loop.is_cut |= time.perf_counter() >= end
    if not loop.found and not before:
        refuse(loop.refused, machine.devices)
        raise PipelineError(
            f"there is no pipeline of {' or '.join(map(str, groups))} stages through this model;"
            " ask for fewer stages"
        )
    if options.constraints:
        _compare_without_constraints(loop, scope.meshes, counts[0], deadline)
    notify("done", 1.0)
    return loop


def _compare_without_constraints(
    loop: MeshLoop, meshes: Sequence[Mesh], count: int, deadline: Deadline
) -> None:
    """Add the baselines of `meshes`, and of the given ones or all, which constraints rule out."""
    factory = loop.factory
    free = SpaceFactory(factory.graph, recompute=False)
    known = loop.options.meshes or meshes_of(loop.machine.devices)
    for mesh in dict.fromkeys((*known, *meshes)):
        if loop.known and deadline.is_over:
            break
        loop.compare(free, mesh, count, factory.marks)


def _add_pipelines(
    loop: MeshLoop,
    strategies: StartingStrategies,
    numbers: tuple[Sequence[int], Sequence[int]],
    best: float,
    end: float,
    notify: Progress,
) -> None:
    """Add a few strategies in stages, and pipelines around them, that are faster than `best`.

    `numbers` are those of micro-batches and of groups, `best` are seconds.
    Their simulation takes longer than that of other plans, and their additive costs are less exact,
    so they are no part of the frontier. Searched ones have to be clearly faster than strategies.
    """
    if time.perf_counter() >= end or (math.isinf(best) and loop.options.counts == (1,)):
        return  # the search with more micro-batches follows
    notify("strategies in stages", 0.0)
    plain = strategies.pipelines(*numbers, best, end)
    others = strategies.rescheduled(plain, *numbers, best, end)
    loop.bounds += map(loop.bound_on, (*plain, *others))
    for staged in (plain, others):
        found: list[Candidate] = []
        for one in strategies.around(staged):
            notify(f"around the strategy {one.like}", 0.5)
            found += loop.pipelines_around(one, end - time.perf_counter())
        least = min((one.point.time for one in staged), default=math.inf)
        loop.pipelines += staged
        loop.pipelines += [one for one in found if one.point.time * (1 + GAIN) < least]
    loop.pipelines = _few_pipelines(loop.pipelines)


def _few_pipelines(found: Sequence[Candidate]) -> list[Candidate]:
    """The best pipelines under 1F1B, and the best under each of a few others, fastest first.

    The memory of split backward passes is more than tables say, so one schedule has one place.
    """
    of_each: dict[str, list[Candidate]] = {}
    for one in sorted(found, key=lambda one: one.cost):
        assert one.staged is not None
        name = one.staged.schedule
        of_each.setdefault(ONE_F_ONE_B.name if name == GPIPE.name else name, []).append(one)
    plain = of_each.pop(ONE_F_ONE_B.name, [])[:_MOST_PIPELINES]
    others = [first for first, *_ in of_each.values()][:_MOST_PIPELINES]
    return sorted((*plain, *others), key=lambda one: one.cost)


def _part(notify: Progress, begin: float, end: float) -> Progress:
    """The progress function of the part of a search between `begin` and `end`."""
    return lambda what, done: notify(what, begin + (end - begin) * done)


def _ignore_progress(_what: str, _done: float) -> None:
    """Do nothing: the caller gave no progress function."""


def _frontier_of(
    loops: Sequence[MeshLoop], start: float, refinement: Refinements, known: Bound, until: Deadline
) -> SearchedFrontier:
    """The frontier and the baselines of searches of one graph, each of another form of it.

    Plans are built on first use. `known` is a lower bound of the seconds of all plans.
    """
    loop = loops[0]
    wanted = loop.options.constraints
    foresight = Foresight(refinement.of, loop.options.processes)
    axes = AxisNames(loop.machine, given_names(loop.options))
    given = [c.mesh for c in wanted if isinstance(c, OnMesh)]
    is_cut = until.skips and any(one.is_cut for one in loops)

    def bound(peak: Bytes) -> float:
        least = math.inf
        for one in loops:
            least = one.bound(peak, least, closer=not is_cut)
        return max(least, known(peak))

    def write(candidate: Candidate) -> Plan:
        notes = _constraint_notes(wanted, candidate.broken)
        plan = candidate.plan(bound(candidate.peak), notes)
        return axes.as_given(plan, given) if is_strategy(plan) else axes.named(plan)

    permitted = [c for one in loops for c in one.permitted]
    every = [*(c for one in loops for c in one.found), *permitted]
    most = max(_MOST_EXACT * loop.options.exact, loop.options.points)
    kept = spaced(every, [c.cost for c in every], most, RESOLUTION, [c.cost for c in permitted])
    shown = _first_of_each([c for one in loops for c in one.known])
    staged = _few_pipelines([c for one in loops for c in one.pipelines])
    plans, baselines = _plans(kept, write), _plans(shown, write)
    refinement.add(loops)
    if loop.machine.settles and not until.is_over:  # then seconds do not just add up

        def timed(candidate: Candidate) -> Plan:
            return refinement.ranked(write(candidate))

        every_kept = list({id(c): c for c in (*kept, *permitted)}.values())
        kept, plans = _thinned(every_kept, timed, loop.options.points)
        costs, written = settled(shown, timed)
        baselines = _settled(list(zip(shown, costs, strict=True)), written)
    return SearchedFrontier(
        plans,
        baselines,
        search_seconds=time.perf_counter() - start,
        constraints=tuple(map(str, wanted)),
        broken={c.name: tuple(map(str, c.broken)) for c in shown if c.broken},
        simulation=refinement,
        least=lambda index: kept[index].least,
        least_of_baseline=lambda index: shown[index].least,
        off_frontier=OffFrontierPlans(
            every,
            write,
            refinement.seconds,
            refinement.compared,
            refinement.deepened,
            adds_up=not loop.machine.settles,
            foresight=foresight,
        ).faster,
        foresight=foresight,
        device_bytes=loop.machine.device.usable_bytes,
        hints=(*loop.notes, ENDED) if is_cut else loop.notes,
        pipelines=_plans(staged, write),
        least_within=bound,
        deadline=until,
        is_cut=is_cut,
    )


def _thinned(
    kept: Sequence[Candidate], timed: Callable[[Candidate], Plan], most: int
) -> tuple[list[Candidate], Plans]:
    """At most `most` candidates on the frontier by their simulated times, and their plans."""
    costs, written = settled(kept, timed)
    thinned = spaced(list(zip(kept, costs, strict=True)), costs, most, 0.0)
    return [candidate for candidate, _ in thinned], _settled(thinned, written)


def _constraint_notes(wanted: Sequence[Constraint], broke: Sequence[Constraint]) -> tuple[str, ...]:
    """The note of a plan about the constraints."""
    if broke:
        return (f"breaks the constraints: {'; '.join(map(str, broke))}",)
    return (f"made under the constraints: {'; '.join(map(str, wanted))}",) if wanted else ()


def _plans(candidates: Sequence[Candidate], write: Callable[[Candidate], Plan]) -> Plans:
    names = [c.name for c in candidates]
    return Plans([c.cost for c in candidates], lambda index: write(candidates[index]), names)


def _settled(
    found: Sequence[tuple[Candidate, tuple[Seconds, Bytes]]], written: Callable[[Candidate], Plan]
) -> Plans:
    names = [candidate.name for candidate, _ in found]
    return Plans([cost for _, cost in found], lambda index: written(found[index][0]), names)


def _first_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest candidate of each name, in order of first appearance; permitted ones win."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.name)
        if known is None or _rank(candidate) < _rank(known):
            best[candidate.name] = candidate
    return list(best.values())


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return bool(candidate.broken), candidate.point.time
