"""Refines time and memory of the plans that are shown, from one lowering of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
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
from shardwright.planner.plans.simulated.folded_costs import KEPT, FoldedCosts
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
DEPTHS_OF_WHOLE = (4,)  # of plans that no few layers stand for, whose simulation takes long
_NO_GAIN = 1e-4  # the fraction for which no more are tried
_LEAST_GAIN = 5e-3  # the fraction of a step's time for which more buckets are in flight


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
class Refinement:
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
        # By the id of the given plan; the first entry keeps that plan alive.
        self._timed: dict[int, tuple[Plan, Plan]] = {}
        self._settled: dict[int, tuple[Plan, Plan]] = {}
        self._compared: dict[int, tuple[Plan, Plan]] = {}
        self._originals: dict[
            int, tuple[Plan, Plan]
        ] = {}  # those that were given, by what they became
        self._read: tuple[Plan, Decisions] | None = None
        self._last: tuple[Plan, PlanLowering] | None = None
        self._simulated_plans: dict[int, tuple[Plan, Plan]] = {}  # without notes
        self._remembered: dict[int, tuple[Plan, Plan]] = {}  # plans with their memory
        self._worst: dict[int, tuple[Plan, RankPeak]] = {}  # of plans that were compared
        self._seconds: dict[Hashable, Seconds] = {}  # by `_choices`
        # Plans with another number of buckets ahead, by the id of the given plan.
        self._deeper: dict[tuple[int, int], tuple[Plan, Plan]] = {}
        # Step times from few layers, None of those that only all layers determine.
        self._of_few: dict[int, tuple[Plan, Seconds | None]] = {}

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
        _, plan = self._originals.get(id(plan), (None, plan))
        if id(plan) in self._settled:
            return self._settled[id(plan)][1]
        if id(plan) not in self._compared:
            found = self._from_few_layers(plan) or self._whole(plan)
            self._compared[id(plan)] = plan, found
            self._originals.setdefault(id(found), (found, plan))
        return self._compared[id(plan)][1]

    def peak(self, plan: Plan) -> Bytes:
        """The peak memory that `compared` finds, without the step time where that takes longer."""
        _, plan = self._originals.get(id(plan), (None, plan))
        for known in (self._settled, self._compared):
            if id(plan) in known:
                return known[id(plan)][1].peak_bytes
        if plan.memory is not None or plan.pipeline is not None:
            return self.compared(plan).peak_bytes
        return (self._peak_of_few_layers(plan) or self._with_memory(plan)).peak_bytes

    def seconds(self, plan: Plan) -> Seconds:
        """The step time that `compared` finds, without memory."""
        _, plan = self._originals.get(id(plan), (None, plan))
        for known in (self._settled, self._compared, self._timed):
            if id(plan) in known:
                return known[id(plan)][1].step_seconds
        key = _choices(plan)
        if key not in self._seconds:
            found = self._seconds_of_few_layers(plan)
            if found is None:
                simulated = self.timed if plan.pipeline is None else self.compared
                found = simulated(plan).step_seconds
            self._seconds[key] = found
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
        if id(plan) not in self._of_few:
            self._of_few[id(plan)] = plan, self._folded.seconds(plan, self._decisions(plan))
        return self._of_few[id(plan)][1]

    def _peak_of_few_layers(self, plan: Plan) -> Plan | None:
        """`plan` with its peak from few layers; None if only the whole program determines it."""
        memories = self._memories
        decisions = self._decisions(plan)
        given = decisions, memories.trainer(decisions), memories.tracer
        peak = self._folded.peak(plan, *given)
        if peak is None:
            return None
        self._worst[id(plan)] = plan, peak
        return replace(plan, peak_bytes=peak.bytes, useful_seconds=self._useful_seconds)

    def _with_memory(self, plan: Plan) -> Plan:
        """`plan` with its simulated memory."""
        if id(plan) not in self._remembered:
            _, worst = self._worst.get(id(plan), (None, None))
            found = self._from_few(plan, lambda one: self._memories.settled(plan, one, worst))
            self._remembered[id(plan)] = plan, found
        return self._remembered[id(plan)][1]

    def timed(self, plan: Plan) -> Plan:
        """`plan` with the time of its step."""
        if id(plan) not in self._timed:
            found = self._from_few(plan, lambda lowering: self._times.refined(plan, lowering))
            self._timed[id(plan)] = plan, found
        return self._timed[id(plan)][1]

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
        _, plan = self._originals.get(id(plan), (None, plan))
        simulated = self._with_memory(plan)
        return replace(found, memory=simulated.memory, peak_bytes=simulated.peak_bytes)

    def settled(self, plan: Plan) -> Plan:
        """`plan` with the time and the memory of its step, as it is shown to users."""
        _, plan = self._originals.get(id(plan), (None, plan))
        if id(plan) not in self._settled:
            found = self._whole(plan)
            notes = (
                *self._note_on_offload(found),
                *self._note_on_host(found),
                *self._note_on_reserved(found),
            )
            found = replace(found, notes=tuple(dict.fromkeys((*found.notes, *notes))))
            self._settled[id(plan)] = self._settled[id(found)] = plan, found
        return self._settled[id(plan)][1]

    def _whole(self, plan: Plan) -> Plan:
        """`plan` with its simulated time and memory, from all of its layers."""
        if id(plan) not in self._simulated_plans:
            found = replace(self._simulated(plan), useful_seconds=self._useful_seconds)
            self._simulated_plans[id(plan)] = plan, found
        return self._simulated_plans[id(plan)][1]

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
        _, given = self._originals.get(id(plan), (plan, plan))
        sharded = any(
            isinstance(placement, Shard)
            for p in given.parameters
            for placement in p.layout.placements
        )
        if given.pipeline is not None or not self._machine.soon_overlap or not sharded:
            return plan
        found = [plan]
        folds = self._seconds_of_few_layers(given) is not None
        for ahead in DEPTHS if folds else DEPTHS_OF_WHOLE:
            if ahead <= given.ahead:
                continue
            deeper = self._with_ahead(given, ahead)
            if self.seconds(deeper) >= found[-1].step_seconds:
                break  # no faster than the one before, so its memory does not matter
            deeper = self.compared(deeper)
            if limit is not None and deeper.peak_bytes > limit:
                break
            found.append(deeper)
            if deeper.step_seconds > (1 - _NO_GAIN) * found[-2].step_seconds:
                break
        fastest = min(one.step_seconds for one in found)
        return next(one for one in found if one.step_seconds * (1 - _LEAST_GAIN) <= fastest)

    def _with_ahead(self, given: Plan, ahead: int) -> Plan:
        """`given` with so many buckets ahead; the same plan for the same arguments."""
        if ahead == given.ahead:
            return given
        if (id(given), ahead) not in self._deeper:
            plain = replace(given, ahead=ahead, memory=None, timeline=None)
            self._deeper[id(given), ahead] = given, plain
        return self._deeper[id(given), ahead][1]

    def knows(self, plan: Plan) -> bool:
        """Whether `compared` of this plan is simulated."""
        _, plan = self._originals.get(id(plan), (None, plan))
        return id(plan) in self._compared or id(plan) in self._settled

    def knows_seconds(self, plan: Plan) -> bool:
        """Whether `seconds` of this plan are known."""
        _, given = self._originals.get(id(plan), (None, plan))
        return self.knows(plan) or id(given) in self._timed or _choices(given) in self._seconds

    def learn_seconds(self, plan: Plan, seconds: Seconds) -> None:
        """Keep the `seconds` of a plan that a refinement in another process found."""
        self._seconds[_choices(plan)] = seconds

    def simulated(self, plan: Plan) -> dict[int, Simulated]:
        """All that is known of a given plan and its forms with more buckets ahead, by `ahead`."""
        found = {}
        for ahead in (plan.ahead, *DEPTHS):
            one = plan if ahead == plan.ahead else self._deeper.get((id(plan), ahead), (plan,))[-1]
            if one.ahead != ahead:
                continue
            if id(one) in self._compared:
                after = self._compared[id(one)][1]
                changes = {
                    field.name: value
                    for field in fields(one)
                    if (value := getattr(after, field.name)) is not getattr(one, field.name)
                }
                few, worst = self._of_few.get(id(one)), self._worst.get(id(one))
                known = few and few[1] is not None, worst and worst[1]
                found[ahead] = Simulated(changes, after.step_seconds, *known)
            elif (key := _choices(one)) in self._seconds:
                found[ahead] = Simulated(None, self._seconds[key])
        return found

    def learn(self, plan: Plan, found: Mapping[int, Simulated]) -> None:
        """Keep what `simulated` returned for the same plan in another process."""
        for ahead, (changes, seconds, folds, worst) in found.items():
            one = self._with_ahead(plan, ahead)
            if changes is None:
                self._seconds[_choices(one)] = seconds
                continue
            after = replace(one, **changes)
            self._compared[id(one)] = one, after
            self._originals.setdefault(id(after), (after, one))
            if folds is not None:
                self._of_few[id(one)] = one, after.step_seconds if folds else None
            if worst is not None:
                self._worst[id(one)] = one, worst
            if after.memory is not None:
                self._simulated_plans[id(one)] = one, after

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
            known, (given, lowering) = self._deeper.get((id(self._last[0]), plan.ahead)), self._last
            if known is not None and known[0] is given and known[1] is plan:
                return lowering.with_ahead(plan.ahead)
        decisions = self._decisions(plan)
        made = self.graph, self._analysis, decisions, self._alone_bytes, self._counts.split
        return PlanLowering(*made)


def _choices(plan: Plan) -> Hashable:
    """All that decides the time of a step; names of plans and axes do not."""
    return (
        *(plan.layout_mesh.shape, plan.stage_ranks),
        *(plan.micro_batches, plan.gradient_sync, plan.ahead, plan.compiled),
        *(plan.schedule, plan.cuts, plan.offload, plan.on_device, plan.async_tp),
        plan.update_group_bytes,
        tuple((op.tiling, op.segment, op.kept) for op in plan.ops),
        tuple((one.layout.placements, one.regathered) for one in plan.parameters),
    )


def _with_seconds(plan: Plan, seconds: Seconds) -> Plan:
    """`plan` with this step time, and its lower bound reduced to it if that is larger."""
    least = min(plan.lower_bound_seconds, seconds)
    return replace(plan, step_seconds=seconds, lower_bound_seconds=least)
