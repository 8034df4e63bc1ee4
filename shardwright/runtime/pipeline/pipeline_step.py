"""Runs the step program of one rank of a synchronous pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.dead_code import forward_only
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.lower.pipelines.stage_builder import stage_prefix
from shardwright.program.step.optimize import optimized
from shardwright.program.step.passes.free import free
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.batch import InputPart, local_inputs, stage_inputs
from shardwright.runtime.executor.executor import Values
from shardwright.runtime.executor.program_module import ProgramModule
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.parameter_store import ParameterStore
from shardwright.runtime.parameters.dtensor_spec import local
from shardwright.tracing.arguments import CallForm


def pipeline_program(staged: StagedGraph, rank: int) -> StepProgram:
    """The step program of `rank` of all groups in training."""
    return optimized(lower_pipeline(staged, rank, in_place))


@final
class PipelineStep(ProgramModule):
    """The step `program` of this rank, at `place` of its group; arguments as of `ProgramModule`."""

    def __init__(
        self,
        staged: StagedGraph,
        program: StepProgram,
        place: int,
        groups: Mapping[str, dist.ProcessGroup],
        make: Callable[[Special], nn.Module],
        device: torch.device,
    ) -> None:
        evaluation = free(forward_only(program))
        super().__init__(program, evaluation, staged.graph, groups, make, device)
        # For each stage, its part of the batch by path, and the names of these leaves.
        self.inputs: list[tuple[dict[str, InputPart], dict[str, str]]] = []
        group, _ = staged.decisions.stage_ranks.position(program.rank)
        homes = staged.pipeline.homes
        for stage in (stage for stage, home in enumerate(homes) if home == group):
            parts, prefix = stage_inputs(staged, stage, place), stage_prefix(staged, stage)
            leaves = staged.parts[stage].graph.leaves_of(LeafKind.INPUT)
            names = {f"{prefix}{x.name}": x.keys[0] for x in leaves if x.keys[0] in parts}
            self.inputs.append((parts, names))

    def given(
        self,
        form: CallForm,
        call: tuple[tuple[object, ...], Mapping[str, object]],
        holds: ParameterStore,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """The initial values of the program, from the arguments of a call."""
        values: dict[str, torch.Tensor] = {}
        for name in self.program.leaves:
            leaf = holds.constants.get(name)
            tile = local(holds.tensor(name)) if leaf is None else leaf
            values[name] = tile.detach().view(self.loads.get(name, tile.shape))
        micro: dict[str, tuple[InputPart, torch.Tensor]] = {}
        for parts, names in self.inputs:
            batch = local_inputs(form, *call, parts, device)
            micro.update((name, (parts[key], batch[key])) for name, key in names.items())
        for name, number, value in self.program.inputs:
            part, whole = micro[name]
            values[value] = part.micro_batch(whole, number)
        return values

    # Only regions are compiled: a compiler cannot trace a backward pass inside of a forward pass.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(
        self, given: dict[str, torch.Tensor], state: torch.Tensor, *, trains: bool
    ) -> Values:
        """Runs the program and returns its results by name; `state` is that of random numbers."""
        if not trains:
            with torch.no_grad():
                return self.evaluation.run(given, state)[0]
        given.update((seed, self.seed()) for _, seed in self.program.seeds)
        found, self.ended = self.training_step.run(given, state)
        return found
