"""Lowers a pipeline: the stage programs of one rank and the messages between stages.

A stage is a part of the graph on the mesh of one group of devices. All groups
have the same mesh, so a device sends its tiles to the device at the same position
in the next group, in the layout in which they were made; the receiver brings
them to the layout in which it reads them, as it does with values of its own.
Their gradients come back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Layout, local_atoms, shape_of
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.schedules.weight_versions import weights_named
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Shape
from shardwright.program.lower.micro_batches import (
    GraphPart,
    MicroPrograms,
    lower_part,
    micro_batch_layouts,
)
from shardwright.program.lower.stages import Stage, StageError, needs_one_stage, split
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches, extended, micro_batches, undivided_batch


@dataclass(frozen=True)
class Crossing:
    """One value that crosses from a stage to the next, as one rank sends it in one micro-batch."""

    name: str
    shape: Shape
    dtype: str
    differentiable: bool


class StagedGraph:
    """A graph in stages with all layouts; `micro` is its batch in micro-batches, if known.

    `weights` has the weight versions of an asynchronous pipeline.

    Raises `PipelineError` for an impossible pipeline.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        decisions: Decisions,
        micro: MicroBatches | None = None,
    ) -> None:
        assert decisions.pipeline is not None, "these decisions have no pipeline"
        self.graph = graph
        self.analysis = analysis
        self.decisions = decisions
        self.pipeline = decisions.pipeline
        name = self.pipeline.weights
        self.weights = None if name is None else weights_named(name)
        self.pipeline.check(decisions.micro_batches)
        # Stages that update their weights on their own cannot have copies of one.
        self.parts = _parts(graph, self.pipeline, copies=name is None)
        if micro is None:
            count = decisions.micro_batches
            whole = count == 1
            micro = (
                undivided_batch(graph, analysis) if whole else micro_batches(graph, analysis, count)
            )
        self.micro = micro
        self.layouts_by_op = micro_batch_layouts(graph, analysis, self.micro, decisions)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Layouts of every value that an operator makes, and of every leaf that crosses."""
        wide = self.micro.mesh(self.decisions.mesh)
        found = {leaf.name: Layout.replicated(wide) for leaf in self.graph.leaves}
        for name, layout in self.decisions.storage.items():
            found[name] = extended(layout, wide, found[name].placements[0])
        for op in self.graph.ops:
            found.update(zip(op.outputs, self.layouts_by_op[op.name].results, strict=True))
        return found

    def programs(
        self, stage: int, rank: int, numbers: Sequence[int] | None = None
    ) -> MicroPrograms:
        """The programs of `rank` of a group for `stage`, for the micro-batches `numbers`."""
        one = self.parts[stage]
        received = {name: self.layouts[name] for name in one.received}
        part = GraphPart(one.graph, self.layouts_by_op, received, one.sent)
        return lower_part(part, self.analysis, self.micro, self._decisions_of(stage), rank, numbers)

    def _decisions_of(self, stage: int) -> Decisions:
        """The decisions for a stage, which reads weights again if they change before then.

        No asynchronous stage keeps copies of weights for its backward pass.
        """
        if self.weights is None:
            return self.decisions
        parameters = frozenset(leaf.name for leaf in self.graph.leaves_of(LeafKind.PARAMETER))
        keeps = self.weights.keeps(stage, self.pipeline.stages)
        return replace(self.decisions, regathered=parameters, rereads=not keeps)

    def crossing(self, stage: int, number: int, rank: int) -> tuple[Crossing, ...]:
        """The values that `rank` sends from `stage` to the next in micro-batch `number`."""
        at = (number, *self.decisions.mesh.coordinate(rank))
        return tuple(self._crossing(name, at) for name in self.parts[stage].sent)

    def _crossing(self, name: str, at: tuple[int, ...]) -> Crossing:
        tensor = self.graph.tensor[name]
        shape = shape_of(local_atoms(self.analysis.atoms[name], self.layouts[name], at))
        return Crossing(name, shape, tensor.dtype, tensor.requires_grad)

    @cached_property
    def holders(self) -> Mapping[str, tuple[int, ...]]:
        """The stages that have each parameter."""
        found: dict[str, list[int]] = {}
        for number, part in enumerate(self.parts):
            for leaf in part.graph.leaves_of(LeafKind.PARAMETER):
                found.setdefault(leaf.name, []).append(number)
        return {name: tuple(stages) for name, stages in found.items()}


def _parts(graph: Graph, pipeline: Pipeline, *, copies: bool) -> tuple[Stage, ...]:
    """The stages of `graph`; raises `PipelineError` if it cannot be cut so."""
    position = {op.name: i for i, op in enumerate(graph.ops)}
    loss = [graph.tensor[name] for name in graph.outputs]
    if len(loss) != 1 or loss[0].shape or not loss[0].requires_grad:
        raise PipelineError(
            "a pipeline needs a module that returns its loss, a scalar, and nothing else; compute"
            " the loss inside the module"
        )
    if reason := needs_one_stage(graph):
        raise PipelineError(reason)
    for name in pipeline.cuts:
        if name not in position:
            raise PipelineError(f"the cut before {name} is before no operator of the model")
    try:
        return split(graph, [position[name] for name in pipeline.cuts], copies=copies)
    except StageError as e:
        raise PipelineError(str(e)) from e
