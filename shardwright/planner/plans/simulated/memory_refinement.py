"""Refines the memory of finished plans by simulating the lifetimes of their tensors.

The tables are additive, so they also count tensors that are never alive at the same time. A plan is
lowered for its first rank, and for its last rank if ranks may differ, and its memory is simulated
(`simulate/memory/step/rank_step.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, final

from shardwright.ir.layout import Bytes, largest_atoms, local_atoms
from shardwright.ir.memory import Memory
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.optimizers import by_tiles, optimizer_spec, placed
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.program.decisions import Decisions
from shardwright.program.step.folding.sections import FoldedGraph, sections_of
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.rule import Rule, Tiling
from shardwright.simulate.memory.step.folded_step import FoldedStep
from shardwright.simulate.memory.step.rank_step import StepSimulation, Trainer
from shardwright.simulate.memory.values import RankModel


@final
class MemoryRefinement:
    """Replaces the additive memory of plans on `machine` by simulated memory.

    `tracer` traces the memory of single operator calls.
    """

    def __init__(self, machine: Machine, optimizer: str, tracer: OpTracer) -> None:
        self.tracer = tracer
        self._machine, self._device, self._optimizer = machine, machine.device, optimizer
        self._trainers: dict[str, Trainer] = {}

    def trainer(self, decisions: Decisions) -> Trainer:
        """Facts of the optimizer, whose state is where the decisions say, and of the ranks."""
        name = placed(self._optimizer, decisions.offload)
        if name not in self._trainers:
            machine, spec = self._machine, optimizer_spec(name)
            backend = machine.backend_spec
            self._trainers[name] = Trainer(
                spec,
                RankModel(backend, machine.device.channel_block, machine.expert_skew),
                spec.runs(
                    plain=machine.devices == 1 or by_tiles(spec), on_gpu=backend.device != "cpu"
                ),
            )
        return self._trainers[name]

    def settled(self, plan: Plan, lowering: PlanLowering, worst: RankPeak | None = None) -> Plan:
        """`plan`, lowered by `lowering`, with its simulated memory.

        The memory of asynchronous pipelines is not simulated, and stays additive. `worst` is the
        rank that needs most, if it is known.

        Raises:
            NotPeriodicError: micro-batches that the lowering of a pipeline leaves out do not need
                what others need.
        """
        if plan.memory is not None:
            return plan
        ranks = ranks_that_differ(lowering) if worst is None else (worst.rank,)
        found = [self._memory(lowering, rank) for rank in ranks]
        if worst is not None and found[0][0].peak != worst.bytes:
            found = [self._memory(lowering, rank) for rank in ranks_that_differ(lowering)]
        most, group_bytes = max(found, key=lambda one: one[0].peak)
        libraries = self._device.workspace_bytes
        most = replace(
            most,
            context=self._device.context_bytes,
            libraries=libraries,
            reserved=Bytes(most.reserved + libraries) if most.reserved else most.reserved,
        )
        groups = Bytes(group_bytes) if group_bytes else plan.update_group_bytes
        return replace(plan, memory=most, peak_bytes=most.peak, update_group_bytes=groups)

    def _memory(self, lowering: PlanLowering, rank: int) -> tuple[Memory, int]:
        """The memory of a rank, and the bytes of parameters that it updates at once; 0: all."""
        trainer = self.trainer(lowering.decisions)
        if not lowering.left_out:
            step = StepSimulation(lowering, rank, trainer, self.tracer)
            return step.memory(), step.group_bytes
        graph = FoldedGraph(lowering.graph, {}, (), {})  # with all its layers
        folded = FoldedStep(lowering.graph, graph, lowering, rank, trainer, self.tracer)
        found = folded.memory(sections_of(lowering.program(rank), graph))
        return found, folded.step.group_bytes


class RankPeak(NamedTuple):
    """A rank and its peak memory."""

    rank: int
    bytes: Bytes


def ranks_that_differ(lowering: PlanLowering) -> tuple[int, ...]:
    """The ranks to simulate; one of them has the largest peak memory of all ranks."""
    ranks = lowering.decisions.stage_ranks
    alone = ranks.size == 1 or ranks_are_equal(lowering)
    places = (0,) if alone else (0, ranks.size - 1)
    return tuple(ranks.rank(group, place) for group in range(ranks.groups) for place in places)


def ranks_are_equal(lowering: PlanLowering) -> bool:
    """Whether all ranks certainly use equal memory: every cut gives parts of one size.

    Joint splits may be uneven in other ways, so they count as unequal.
    """
    decisions, analysis = lowering.decisions, lowering.analysis
    mesh, count = decisions.mesh, decisions.micro_batches
    last = mesh.coordinate(mesh.size - 1)
    for name, layout in decisions.storage.items():
        atoms = analysis.atoms[name]
        if local_atoms(atoms, layout, last) != largest_atoms(atoms, layout):
            return False
    shape, tilings = mesh.shape, decisions.tilings
    if count > 1:
        shape, tilings = (count, *shape), lowering.micro.tilings(tilings)
    pairs = ((analysis.rules[op.name], tilings[op.name]) for op in lowering.graph.ops)
    distinct = {(id(rule), tiling): (rule, tiling) for rule, tiling in pairs}
    return all(_cuts_evenly(rule, tiling, shape) for rule, tiling in distinct.values())


def _cuts_evenly(rule: Rule, tiling: Tiling, shape: Sequence[int]) -> bool:
    """Whether all parts of what an operator splits along axes of these sizes are equal."""
    shared = {factor for group in rule.joint_splits for factor in group}
    left = {name: factor.size for name, factor in rule.factor.items()}
    for choice, parts in zip(tiling, shape, strict=True):
        for name in rule.cuts(choice):
            if name in shared or left[name] % parts:
                return False
            left[name] //= parts
    return True
