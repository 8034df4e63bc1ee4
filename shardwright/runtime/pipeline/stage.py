"""One pipeline stage on one device: its parameters, buffers and program.

The program takes the weights as arguments, so that it can run with other weights than the stored
ones. If several devices share a stage, the program is that of one device and weights are its tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import LeafKind
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.schedules.registry import continuous
from shardwright.program.decisions import Decisions, everything_whole
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.lower.stages import Stage, StageError
from shardwright.program.passes import stage_program
from shardwright.rules.analysis import Analysis, analyze
from shardwright.runtime.async_pipeline.weight_swap_hooks import WeightSwap
from shardwright.runtime.batch import local_inputs, stage_inputs
from shardwright.runtime.graph_modules.fx import to_module
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
        """The stages of a plan. Weights that are stored in another layout than they are read are
        redistributed again in the backward pass, from the weight version of that pass.
        """
        weights = captured.graph.leaves_of(LeafKind.PARAMETER)
        again = replace(decisions, regathered=frozenset(leaf.name for leaf in weights))
        return cls(captured, StagedGraph(captured.graph, analysis, again))

    @property
    def parts(self) -> tuple[Stage, ...]:
        return self.staged.parts

    @property
    def analysis(self) -> Analysis:
        """The analysis of the whole graph, whose operator positions determine random numbers."""
        return self.staged.analysis

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


class StageModule(LastingModule):
    """The parameters of a stage, under the module's names, and its program.

    They have the model's shapes; with a device mesh, on which the stage is shared, they are
    DTensors, as those of a `ParallelModule`.
    """

    def __init__(
        self,
        stages: Stages,
        index: int,
        model: nn.Module,
        device: torch.device,
        seed: int,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        staged, graph = stages.staged, stages.parts[index].graph
        captured, decisions = stages.captured, staged.decisions
        place = place_in(device_mesh)
        self._sw_stage = stages.parts[index]
        self._sw_device = device
        self._sw_swap = WeightSwap()
        self._sw_holds = ParameterStore(
            self, captured, staged.analysis, decisions, device_mesh, device
        )
        self._sw_holds.take(graph, ModuleOptions.of(model, device))
        check_on_load(self, self._sw_holds.elsewhere)
        make = module_maker(
            captured, decisions.mesh, device_mesh, device, model.training, self._sw_swap.later
        )
        lowered = staged.programs(index, place)
        (program,) = lowered.programs
        self._sw_program = to_module(stage_program(program, graph), device, make)
        self._sw_reductions = {one.value: make(one) for one in lowered.reductions}
        self._sw_inputs = stage_inputs(staged, index, place)
        self._sw_form = CallForm(captured.graph, captured.signature)
        parameters = graph.leaves_of(LeafKind.PARAMETER)
        self._sw_trained = [
            leaf.name for leaf in parameters if graph.tensor[leaf.name].requires_grad
        ]
        self._sw_updates = tuple(buffer for buffer, _ in graph.updates)
        self._sw_tiles = [_tile(parameter) for parameter in self.trained()]
        fast = captured.graph.numerics.rng == "fast"
        state = random_state(seed, 0, torch.device("cpu") if fast else device)
        self.register_buffer("_sw_random", state, persistent=False)
        self.train(model.training)

    @property
    def stage(self) -> Stage:
        return self._sw_stage

    @property
    def swap(self) -> WeightSwap:
        """The weight versions that its passes run with."""
        return self._sw_swap

    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient here, in the order in which `run` takes weights."""
        return [self.get_parameter(name) for name in self._sw_trained]

    def tiles(self) -> list[nn.Parameter]:
        """This device's tiles of `trained`, sharing their memory; they receive the gradients."""
        return self._sw_tiles

    def collect_gradients(self) -> None:
        """Set `grad` of each parameter to the sum over all devices of the stage."""
        for name, parameter, tile in zip(
            self._sw_trained, self.trained(), self._sw_tiles, strict=True
        ):
            if not isinstance(parameter, DTensor):
                continue  # it is its own tile, and whole
            gradient, tile.grad = tile.grad, None
            if gradient is not None and name in self._sw_reductions:
                gradient = self._sw_reductions[name](gradient)
            parameter.grad = None if gradient is None else DTensorSpec(parameter).whole(gradient)

    def run(
        self,
        weights: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        batch: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """The stage's outputs, with `weights` in place of its trained parameters.

        In training mode buffers are updated, and random numbers go on to the next step's.
        """
        graph = self._sw_stage.graph
        given = dict(zip(self._sw_trained, weights, strict=True))
        given |= dict(zip(self._sw_stage.received, received, strict=True))
        leaves = (local(leaf) for leaf in self._sw_holds.leaves(graph, batch, given))
        state = self.get_buffer("_sw_random")
        results = self._sw_program(*leaves, state)
        outputs = results[: len(graph.outputs)]
        if self.training:
            with torch.no_grad():
                self._sw_holds.update(graph, results[len(outputs) :])
            # Not in place: tensors that autograd saved in this step may still read the old state.
            self._sw_random = state + state.new_tensor([0, 1])
        return tuple(outputs)

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


def _tile(parameter: nn.Parameter) -> nn.Parameter:
    """This device's tile of a parameter, sharing its memory; a plain one is its own."""
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(local(parameter).detach())
