"""One stage of an asynchronous pipeline on one device: its parameters, buffers and programs.

If several devices share a stage, weights are tiles, and programs are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import LeafKind
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules.registry import continuous
from shardwright.ir.schedules.weight_versions import Weights
from shardwright.program.decisions import Decisions, everything_whole
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.lower.stages import Stage, StageError
from shardwright.program.step.async_pipeline.stage_programs import StagePrograms, stage_programs
from shardwright.program.step.instructions import Recv, Send
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.analysis import Analysis, analyze
from shardwright.runtime.batch import local_inputs, stage_inputs
from shardwright.runtime.executor.executor import Values
from shardwright.runtime.executor.messages import MessageEnd
from shardwright.runtime.executor.program_module import ProgramModule
from shardwright.runtime.graph_modules.instruction_modules import module_maker
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parameter_store import ParameterStore, place_in
from shardwright.runtime.parameters.dtensor_spec import DTensorSpec, local
from shardwright.runtime.parameters.state_dicts import check_on_load
from shardwright.runtime.random.dropout import random_state
from shardwright.runtime.train_module import LastingModule, arguments
from shardwright.tracing.arguments import CallForm
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.graph_builder import Captured


@dataclass(frozen=True)
class Stages:
    """A captured call that is cut into stages, with the layouts of their tensors."""

    captured: Captured
    staged: StagedGraph

    @classmethod
    def planned(cls, captured: Captured, analysis: Analysis, decisions: Decisions) -> Stages:
        """The stages of a plan."""
        return cls(captured, StagedGraph(captured.graph, analysis, decisions))

    def under(self, weights: Weights) -> Stages:
        """The same stages with these weight versions."""
        staged = self.staged
        pipeline = replace(staged.pipeline, schedule=continuous(weights.name).name)
        if pipeline == staged.pipeline:
            return self
        decisions = replace(staged.decisions, pipeline=pipeline)
        return Stages(
            self.captured, StagedGraph(staged.graph, staged.analysis, decisions, staged.micro)
        )

    @property
    def parts(self) -> tuple[Stage, ...]:
        return self.staged.parts

    @property
    def analysis(self) -> Analysis:
        """The analysis of the whole graph, whose operator positions determine random numbers."""
        return self.staged.analysis

    def programs(self, stage: int, place: int) -> StagePrograms:
        """The programs of the rank at `place` of the group that has the stage."""
        ranks = self.staged.decisions.stage_ranks
        return stage_programs(self.staged, ranks.rank(stage, place))

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(part.graph.fingerprint for part in self.parts)


def capture_stages(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int,
    cuts: Sequence[int] | None = None,
) -> Stages:
    """Capture one call and cut it, into stages of balanced work unless `cuts` are given.

    Raises `StageError` for a model that does not return its loss alone.
    """
    return cut_stages(capture_with_rules(model, args, kwargs or {}), stages, cuts)


def cut_stages(captured: Captured, stages: int, cuts: Sequence[int] | None = None) -> Stages:
    """The stages of a captured call, each on one device."""
    graph = captured.graph
    if len(graph.outputs) != 1 or graph.tensor[graph.outputs[0]].shape:
        raise StageError(
            f"a pipeline needs a module that returns its loss, a scalar; this one returns"
            f" {len(graph.outputs)} tensors, the first of shape"
            f" {graph.tensor[graph.outputs[0]].shape}: compute the loss inside the module"
        )
    analysis = analyze(graph)
    if cuts is None:
        cuts = balanced_cuts(graph, stages, operator_work(graph, analysis))
    elif len(cuts) != stages - 1:
        raise StageError(f"{stages} stages need {stages - 1} cuts; {len(cuts)} were given")
    if wrong := [cut for cut in cuts if not 0 < cut < len(graph.ops)]:
        raise StageError(f"there is no cut before operator {wrong[0]} of {len(graph.ops)}")
    names = tuple(graph.ops[cut].name for cut in cuts)
    pipeline = Pipeline(names, continuous("stale").name, stages)
    return Stages.planned(captured, analysis, replace(everything_whole(graph), pipeline=pipeline))


class Neighbours(Protocol):
    """The way to the previous and the next stage."""

    def end(self, one: Send | Recv, *, ahead: bool) -> MessageEnd:
        """The end of a message; with `ahead` another one of its kind will follow."""


class StageModule(LastingModule):
    """The parameters of a stage, under the module's names, and the executors of its programs.

    They have the model's shapes; with a device mesh, on which the stage is shared, they are
    DTensors, as those of a `ParallelModule`.
    """

    def __init__(
        self,
        stages: Stages,
        index: int,
        programs: StagePrograms,
        neighbours: Neighbours,
        model: nn.Module,
        device: torch.device,
        seed: int,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        staged, graph = stages.staged, stages.parts[index].graph
        captured, decisions = stages.captured, staged.decisions
        self._sw_stage = stages.parts[index]
        self._sw_device = device
        self._sw_holds = ParameterStore(
            self, captured, staged.analysis, decisions, device_mesh, device
        )
        self._sw_holds.take(graph, ModuleOptions.of(model, device))
        check_on_load(self, self._sw_holds.elsewhere)
        make = module_maker(captured, decisions.mesh, device_mesh, device, model.training)
        groups = {}
        if device_mesh is not None:
            groups = {name: device_mesh[name].get_group() for name in decisions.mesh.names}
        ends = partial(neighbours.end, ahead=True), partial(neighbours.end, ahead=False)
        self._sw_step = ProgramModule(*programs, staged.graph, groups, make, device, ends)
        self._sw_inputs = stage_inputs(staged, index, place_in(device_mesh))
        self._sw_form = CallForm(captured.graph, captured.signature)
        self._sw_keys = {leaf.name: leaf.keys[0] for leaf in graph.leaves_of(LeafKind.INPUT)}
        self._sw_updates = tuple(buffer for buffer, _ in graph.updates)
        fast = captured.graph.numerics.rng == "fast"
        state = random_state(seed, 0, torch.device("cpu") if fast else device)
        self.register_buffer("_sw_random", state, persistent=False)
        self.train(model.training)

    @property
    def stage(self) -> Stage:
        return self._sw_stage

    @property
    def step(self) -> ProgramModule:
        """The executors of its programs."""
        return self._sw_step

    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient here."""
        graph = self._sw_stage.graph
        return [
            self.get_parameter(leaf.name)
            for leaf in graph.leaves_of(LeafKind.PARAMETER)
            if graph.tensor[leaf.name].requires_grad
        ]

    def stored(self, leaf: str) -> torch.Tensor:
        """The parameter or buffer of that leaf."""
        return self._sw_holds.tensor(leaf)

    def given(self) -> dict[str, torch.Tensor]:
        """The initial values of a call, or of an evaluation, but for the batch."""
        step, holds = self._sw_step, self._sw_holds
        values: dict[str, torch.Tensor] = {}
        for name in step.program.leaves:
            constant = holds.constants.get(name)
            tile = local(holds.tensor(name)) if constant is None else constant
            if name in self._sw_updates:  # autograd may keep what it read of them
                tile = tile.clone()
            values[name] = tile.detach().view(step.loads.get(name, tile.shape))
        values.update((seed, step.one) for _, seed in step.program.seeds)
        return values

    def inputs(
        self, program: StepProgram, batch: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The values of a program that are this part of a batch."""
        return {value: batch[self._sw_keys[leaf]] for leaf, _, value in program.inputs}

    def take_gradients(self, found: Values) -> None:
        """Set `grad` of each parameter, from what the program returned."""
        for leaf, value in self._sw_step.program.gradients:
            gradient, parameter = found[value], self._sw_holds.tensor(leaf)
            if gradient is None:
                parameter.grad = None
                continue
            gradient = gradient.view(local(parameter).shape)
            if isinstance(parameter, DTensor):
                gradient = DTensorSpec(parameter).whole(gradient)
            parameter.grad = gradient

    def finish_forward(self, found: Values) -> None:
        """In training mode update buffers, and go on to the random numbers of the next step."""
        if not self.training:
            return
        with torch.no_grad():
            for buffer, name in self._sw_step.program.updates:
                value = found[name]
                assert value is not None, f"{buffer} has no new content"
                self._sw_holds.write(buffer, value)
        self._sw_advance()

    def part_of(self, batch: Any) -> dict[str, torch.Tensor]:
        """This device's part of a global batch; raises `BatchError` if an input is missing."""
        return local_inputs(self._sw_form, *arguments(batch), self._sw_inputs, self._sw_device)

    @property
    def minibatches(self) -> int:
        """The number of mini-batches that were trained here, also before the last resume."""
        return int(self._sw_random[1])

    def get_extra_state(self) -> dict[str, int]:
        """The number of mini-batches seen, which random numbers depend on."""
        return {"minibatches": self.minibatches}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.set_random_state((int(self._sw_random[0]), state["minibatches"]))
