"""Refines time and memory of the plans that are shown, from one lowering of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple, final

from shardwright.ir.frontier import format_bytes
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Seconds, Shard
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.planner.micro_batch_counts import MicroBatchCounts
from shardwright.planner.plans.bandwidth_bound import bandwidth_bound
from shardwright.planner.plans.plan_simulation import PlanSimulation
from shardwright.planner.plans.simulated.folded_costs import KEPT, FoldedCosts
from shardwright.planner.plans.simulated.known_plans import KnownPlans
from shardwright.planner.plans.simulated.memory_refinement import MemoryRefinement, RankPeak
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.processes.known_traces import KnownTraces
from shardwright.program.decisions import Decisions
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.folding.sections import NotPeriodicError
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import Analysis, analyze
from shardwright.simulate.costs.useful_flop import useful_seconds
from shardwright.simulate.time.steady_state import SteadyStateError

DEPTHS = 2, 4, 8  # buckets of parameters that are gathered before they are read
DEPTHS_OF_WHOLE = (2,)  # of plans that no few layers stand for, whose simulation takes long
_NO_GAIN = 1e-4  # the fraction for which no more are tried
_LEAST_GAIN = 5e-3  # the fraction of a step's time for which more buckets are in flight
_ABOUT_FULL = 0.8  # of a device's memory, where fragments may exceed it


class Simulated(NamedTuple):
    """The result of the simulation of a plan.

    * `changes`: the fields of the compared plan that differ from those of the given one; None if
      only its `seconds` were simulated;
    * `folds`: whether few layers give its time, if that is known;
    * `worst`: the rank that needs most memory, if it is known.
    """

    changes: Mapping[str, Any] | None
    seconds: Seconds
    folds: bool | None = None
    worst: RankPeak | None = None


@final
class Refinement(PlanSimulation):
    """Settles plans of `graph` on `machine`: simulates time and memory of their step programs.

    `tracer` traces the memory of single operator calls. `analysis` is computed if it is not given.
    Programs of few layers are kept of the latest `kept` plans.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        optimizer: str,
        tracer: OpTracer,
        analysis: Analysis | None = None,
        kept: int = KEPT,
    ) -> None:
        self.graph, self._given, self._machine, self._kept = graph, analysis, machine, kept
        self._alone_bytes = machine.backend_spec.alone_bytes
        self._times = TimeRefinement(graph, machine)
        self._memories = MemoryRefinement(machine, optimizer, tracer)
        self._known = KnownPlans()
        self._seconds: dict[Hashable, Seconds] = {}  # by `_choices`
        self._peaks: dict[Hashable, Bytes] = {}  # by `_choices`, of copies of plans as well
        self._read: tuple[Plan, Decisions] | None = None
        self._last: tuple[Plan, PlanLowering] | None = None

    @cached_property
    def _analysis(self) -> Analysis:
        return self._given or analyze(self.graph)

    @cached_property
    def _counts(self) -> MicroBatchCounts:
        return MicroBatchCounts(self.graph, self._analysis)

    def ranked(self, plan: Plan) -> Plan:
        """`plan` with the simulated step time, by which candidates are ranked.

        Plans with micro-batches or stages keep their additive time: lowering them takes too long
        for every candidate.
        """
        if plan.pipeline is not None or plan.micro_batches > 1:
            return plan
        seconds = self._seconds_of_few_layers(plan)
        return self.timed(plan) if seconds is None else _with_seconds(plan, seconds)

    def compared(self, plan: Plan) -> Plan:
        """`plan` with the time and peak memory that `settled` finds.

        If they are computed from a few layers, the plan has no timeline and no breakdown of memory.
        """
        known = self._known[plan]
        if known.best is None:
            known.compared = self._from_few_layers(known.given) or self._whole(known.given)
            self._known.link(known.compared, known)
        assert known.best is not None
        return known.best

    def peak(self, plan: Plan) -> Bytes:
        """The peak memory that `compared` finds, without the step time where that takes longer."""
        known = self._known[plan]
        if known.best is not None:
            return known.best.peak_bytes
        plan = known.given
        if plan.memory is not None or plan.pipeline is not None:
            return self.compared(plan).peak_bytes
        key = _choices(plan)
        if key not in self._peaks:
            found = self._peak_of_few_layers(plan) or self._with_memory(plan)
            self._peaks[key] = found.peak_bytes
        return self._peaks[key]

    def reserved(self, plan: Plan) -> Bytes:
        """Bytes of tensors and fragments that torch's allocator reserves in the plan of `settled`.

        Zero where it caches no memory, or the memory is not simulated. From few layers where
        memory is about full, so that the plan may not be the one that is shown.
        """
        known = self._known[plan]
        found = known.settled or known.whole
        if found is None and plan.peak_bytes >= _ABOUT_FULL * self._machine.device.usable_bytes:
            if known.reserved is None:
                known.reserved = self._reserved_of_few_layers(known.given, known.worst)
            if known.reserved is not None:
                return known.reserved
        memory = (found or self.settled(plan)).memory
        return Bytes(0 if memory is None else max(0, memory.reserved - memory.libraries))

    def _reserved_of_few_layers(self, plan: Plan, worst: RankPeak | None) -> Bytes | None:
        """The bytes of `reserved` from few layers; None if only the whole program says them."""
        if worst is None or plan.memory is not None:
            return None
        memories, decisions = self._memories, self._decisions(plan)
        given = decisions, memories.trainer(decisions), memories.tracer, worst.rank
        return self._folded.reserved(plan, *given)

    def seconds(self, plan: Plan) -> Seconds:
        """The step time that `compared` finds, without memory."""
        known = self._known[plan]
        if (found := known.best or known.timed) is not None:
            return found.step_seconds
        plan = known.given
        key = _choices(plan)
        if key not in self._seconds:
            seconds = self._seconds_of_few_layers(plan)
            if seconds is None:
                simulated = self.timed if plan.pipeline is None else self.compared
                seconds = simulated(plan).step_seconds
            self._seconds[key] = seconds
        return self._seconds[key]

    def least_seconds(self, plan: Plan) -> Seconds:
        """A lower bound of the step time, without a step program."""
        return bandwidth_bound(plan, self.graph, self._machine)

    def _from_few_layers(self, plan: Plan) -> Plan | None:
        if plan.memory is not None:
            return None
        seconds = self._seconds_of_few_layers(plan)
        found = None if seconds is None else self._peak_of_few_layers(plan)
        return None if found is None or seconds is None else _with_seconds(found, seconds)

    def _seconds_of_few_layers(self, plan: Plan) -> Seconds | None:
        """The step time from few layers; None if only the whole program determines it."""
        known = self._known[plan]
        if known.folds is None:
            known.few_seconds = self._folded.seconds(plan, self._decisions(plan))
            known.folds = known.few_seconds is not None
        return known.few_seconds

    def _peak_of_few_layers(self, plan: Plan) -> Plan | None:
        """`plan` with its peak from few layers; None if only the whole program determines it."""
        memories = self._memories
        decisions = self._decisions(plan)
        given = decisions, memories.trainer(decisions), memories.tracer
        peak = self._folded.peak(plan, *given)
        if peak is None:
            return None
        self._known[plan].worst = peak
        return replace(plan, peak_bytes=peak.bytes, useful_seconds=self._useful_seconds)

    def _with_memory(self, plan: Plan) -> Plan:
        """`plan` with its simulated memory."""
        known = self._known[plan]
        if known.with_memory is None:
            worst = known.worst
            known.with_memory = self._from_few(
                plan, lambda one: self._memories.settled(plan, one, worst)
            )
        return known.with_memory

    def timed(self, plan: Plan) -> Plan:
        """`plan` with the time of its step."""
        known = self._known[plan]
        if known.timed is None:
            known.timed = self._from_few(plan, lambda one: self._times.refined(plan, one))
        return known.timed

    def _from_few(self, plan: Plan, settled: Callable[[PlanLowering], Plan]) -> Plan:
        """`settled` by few micro-batches of a pipeline if others run as they do, else by all."""
        if plan.pipeline is not None and not plan.is_asynchronous:
            few = self._folded.few_micro_batches(plan, self._decisions(plan))
            if few is not None:
                with suppress(NotPeriodicError, SteadyStateError):
                    return settled(few)
        return settled(self._lowering(plan))

    def with_causes(self, plan: Plan) -> Plan:
        """The plan of `compared` with the breakdown of its memory; it may have no timeline."""
        found = self.compared(plan)
        if found.memory is not None:
            return found
        simulated = self._with_memory(self._known[plan].given)
        return replace(found, memory=simulated.memory, peak_bytes=simulated.peak_bytes)

    def settled(self, plan: Plan) -> Plan:
        """`plan` with the time and the memory of its step, as it is shown to users."""
        known = self._known[plan]
        if known.settled is None:
            found = self._whole(known.given)
            notes = (
                *self._note_on_offload(found),
                *self._note_on_host(found),
                *self._note_on_reserved(found),
            )
            known.settled = replace(found, notes=tuple(dict.fromkeys((*found.notes, *notes))))
            self._known.link(known.settled, known)
        return known.settled

    def _whole(self, plan: Plan) -> Plan:
        """`plan` with its simulated time and memory, from all of its layers."""
        known = self._known[plan]
        if known.whole is None:
            known.whole = replace(self._simulated(plan), useful_seconds=self._useful_seconds)
        return known.whole

    def _note_on_offload(self, plan: Plan) -> tuple[str, ...]:
        """The note on the memory and time of a plan's offload; none for plans with stages."""
        if not plan.offload or plan.pipeline is not None:
            return ()
        bare = replace(plan, offload=(), on_device=(), memory=None, timeline=None)
        without = self.compared(bare)
        saved = format_bytes(max(0, without.peak_bytes - plan.peak_bytes))
        more = max(0.0, plan.step_seconds - without.step_seconds)
        return (f"offload saves {saved} per rank and takes {more * 1e3:.1f} ms of the step",)

    def _note_on_host(self, plan: Plan) -> tuple[str, ...]:
        """A note if what is offloaded exceeds the memory of the host."""
        has = self._machine.device.host_memory_bytes
        if plan.memory is None or has is None or plan.memory.host <= has:
            return ()
        return (
            f"offloaded values take {plan.memory.host / 2**30:.1f} GiB of the memory of the host"
            f" for each device, of which {self._machine} has {has / 2**30:.1f} GiB",
        )

    def _note_on_reserved(self, plan: Plan) -> tuple[str, ...]:
        """A note if the allocator would hold more than a device has, though the tensors fit."""
        if plan.memory is None:
            return ()
        has, kept = self._machine.device.usable_bytes, plan.memory.reserved - plan.memory.libraries
        if not plan.peak_bytes <= has < kept:
            return ()
        return (
            f"torch's allocator would reserve {format_bytes(kept)} with fragments,"
            f" of the {format_bytes(has)} of a device: it frees its cache and tries again, which"
            " takes time and may fail; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps",
        )

    @cached_property
    def _useful_seconds(self) -> Seconds:
        return useful_seconds(self.graph, self._analysis, self._machine.device)

    def _simulated(self, plan: Plan) -> Plan:
        """`plan` with its simulated time and memory."""
        found = self._with_memory(plan)
        # The update in groups that the memory assumes is another program.
        groups = found.update_group_bytes
        timed = self.timed(replace(plan, update_group_bytes=groups) if groups else plan)
        return replace(
            timed, memory=found.memory, peak_bytes=found.peak_bytes, update_group_bytes=groups
        )

    def deepened(self, plan: Plan, limit: Bytes | None) -> Plan:
        """A compared plan that gathers more buckets of parameters ahead, where that is faster.

        Each bucket in flight takes memory, of which the plan needs at most `limit`. A gather waits
        for what was started before it on its links, such as reductions of gradients, and is hidden
        if it is started early enough. Plans with stages are left as they are: they gather once.
        """
        given = self._known[plan].given
        sharded = any(
            isinstance(placement, Shard)
            for p in given.parameters
            for placement in p.layout.placements
        )
        if given.pipeline is not None or not self._machine.soon_overlap or not sharded:
            return plan
        found = [plan]
        folds = self._seconds_of_few_layers(given) is not None
        depths = DEPTHS if folds else DEPTHS_OF_WHOLE
        for ahead in depths:
            if ahead <= given.ahead:
                continue
            deeper = self._with_ahead(given, ahead)
            known, seconds = [one.step_seconds for one in found], self.seconds(deeper)
            if seconds >= known[-1]:
                break  # no faster than the one before, so its memory does not matter
            if ahead == depths[-1] and _about_fastest([*known, seconds]) == _about_fastest(known):
                break  # another one is taken, whether it fits or not
            deeper = self.compared(deeper)
            if limit is not None and deeper.peak_bytes > limit:
                break
            found.append(deeper)
            if deeper.step_seconds > (1 - _NO_GAIN) * found[-2].step_seconds:
                break
        return found[_about_fastest([one.step_seconds for one in found])]

    def _with_ahead(self, given: Plan, ahead: int) -> Plan:
        """`given` with so many buckets ahead; the same plan for the same arguments."""
        if ahead == given.ahead:
            return given
        deeper = self._known[given].deeper
        if ahead not in deeper:
            deeper[ahead] = replace(given, ahead=ahead, memory=None, timeline=None)
        return deeper[ahead]

    def knows(self, plan: Plan) -> bool:
        """Whether `compared` of this plan is simulated."""
        return self._known[plan].best is not None

    def knows_seconds(self, plan: Plan) -> bool:
        """Whether `seconds` of this plan are known."""
        known = self._known[plan]
        return bool(known.best or known.timed) or _choices(known.given) in self._seconds

    def learn_seconds(self, plan: Plan, seconds: Seconds) -> None:
        """Keep the `seconds` of a plan that a refinement in another process found."""
        self._seconds[_choices(plan)] = seconds

    def simulated(self, plan: Plan) -> dict[int, Simulated]:
        """All that is known of a given plan and its forms with more buckets ahead, by `ahead`."""
        found = {}
        for ahead, one in {plan.ahead: plan, **self._known[plan].deeper}.items():
            known = self._known[one]
            if (after := known.compared) is not None:
                changes = {
                    field.name: value
                    for field in fields(one)
                    if (value := getattr(after, field.name)) is not getattr(one, field.name)
                }
                found[ahead] = Simulated(changes, after.step_seconds, known.folds, known.worst)
            elif (key := _choices(one)) in self._seconds:
                found[ahead] = Simulated(None, self._seconds[key])
        return found

    def learn(self, plan: Plan, found: Mapping[int, Simulated]) -> None:
        """Keep what `simulated` returned for the same plan in another process.

        What is compared here already stays: plans are known by identity, as long as they are kept.
        """
        for ahead, (changes, seconds, folds, worst) in found.items():
            one = self._with_ahead(plan, ahead)
            if changes is None:
                self._seconds[_choices(one)] = seconds
                continue
            known = self._known[one]
            if known.compared is not None:
                continue
            after = replace(one, **changes)
            known.compared = after
            self._known.link(after, known)
            if folds is not None:
                known.folds, known.few_seconds = folds, after.step_seconds if folds else None
            if worst is not None:
                known.worst = worst
            if after.memory is not None:
                known.whole = after

    def without_tracing(self) -> None:
        """Let no more operator calls be traced, as in forked processes."""
        self._memories.tracer = KnownTraces(self._memories.tracer)

    @cached_property
    def _folded(self) -> FoldedCosts:
        split = self._counts.split
        return FoldedCosts(self.graph, self._analysis, self._machine, self._kept, split)

    def _decisions(self, plan: Plan) -> Decisions:
        """The decisions of a plan; those of the last one are kept."""
        if self._read is None or self._read[0] is not plan:
            self._read = plan, read_plan(plan, self.graph, self._analysis, self._counts.split)
        return self._read[1]

    def _lowering(self, plan: Plan) -> PlanLowering:
        """The programs of a plan; those of the last one are kept."""
        if self._last is None or self._last[0] is not plan:
            self._last = plan, self._lowered(plan)
        return self._last[1]

    def _lowered(self, plan: Plan) -> PlanLowering:
        """The programs of a plan, from those of the last one if it gathers further ahead alone."""
        if self._last is not None:
            given, lowering = self._last
            if self._known[given].deeper.get(plan.ahead) is plan:
                return lowering.with_ahead(plan.ahead)
        decisions = self._decisions(plan)
        made = self.graph, self._analysis, decisions, self._alone_bytes, self._counts.split
        return PlanLowering(*made)


def _choices(plan: Plan) -> Hashable:
    """All that decides the time of a step; names of plans and axes do not."""
    return (
        *(plan.layout_mesh.shape, plan.stage_ranks),
        *(plan.micro_batches, plan.gradient_sync, plan.ahead, plan.compiled),
        *(plan.schedule, plan.cuts, plan.offload, plan.on_device, plan.async_tp, plan.ep_overlap),
        plan.update_group_bytes,
        tuple((op.tiling, op.segment, op.kept) for op in plan.ops),
        tuple((one.layout.placements, one.regathered) for one in plan.parameters),
    )


def _about_fastest(seconds: Sequence[Seconds]) -> int:
    """The index of the first step that takes hardly longer than the shortest one."""
    fastest = min(seconds)
    return next(i for i, one in enumerate(seconds) if one * (1 - _LEAST_GAIN) <= fastest)


def _with_seconds(plan: Plan, seconds: Seconds) -> Plan:
    """`plan` with this step time, and its lower bound reduced to it if that is larger."""
    least = min(plan.lower_bound_seconds, seconds)
    return replace(plan, step_seconds=seconds, lower_bound_seconds=least)
