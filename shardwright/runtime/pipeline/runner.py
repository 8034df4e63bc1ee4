"""Synchronous pipelines: each rank runs the step program of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import Graph
from shardwright.ir.pipeline import AXIS
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.lower.pipelines.pipeline import pipeline_channels
from shardwright.rules.analysis import Analysis
from shardwright.runtime.comm.channel_groups import ChannelGroups
from shardwright.runtime.device import without_autocast
from shardwright.runtime.graph_modules.instruction_modules import module_maker
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parameter_store import ParameterStore, place_in
from shardwright.runtime.parameters.dtensor_spec import DTensorSpec, check_gradients, local
from shardwright.runtime.parameters.loss_scaling import scaled
from shardwright.runtime.parameters.state_dicts import check_on_load
from shardwright.runtime.pipeline.pipeline_step import PipelineStep, pipeline_program
from shardwright.runtime.random.dropout import random_state
from shardwright.runtime.train_module import OnLoss, TrainModule, arguments
from shardwright.tracing.arguments import CallForm
from shardwright.tracing.graph_builder import Captured


@final
class PipelineModule(TrainModule):
    """This rank's stages of a pipeline; `parallelize` builds it for a plan with stages.

    `parameters` and `state_dict` contain the tensors of this rank's stages, under the module's
    names. A parameter of several stages, such as a tied embedding, is stored on each of them, and
    its gradient is summed over them.
    """

    def __init__(
        self,
        captured: Captured,
        analysis: Analysis,
        decisions: Decisions,
        options: ModuleOptions,
        device_mesh: DeviceMesh,
        shares: PipelineModule | None = None,
    ) -> None:
        super().__init__()
        device, training = options.device, options.training
        staged = StagedGraph(captured.graph, analysis, decisions)
        homes = staged.pipeline.homes
        self._sw_graph = captured.graph
        self._sw_shares = shares is not None
        self._sw_captured = captured
        self._sw_form, self._sw_device = CallForm(captured.graph, captured.signature), device
        inner = device_mesh[decisions.mesh.names]
        place, home = place_in(inner), device_mesh[AXIS].get_local_rank()
        mine = [stage for stage, group in enumerate(homes) if group == home]

        owner = shares or self
        self._sw_holds = ParameterStore(owner, captured, analysis, decisions, inner, device)
        if shares is not None:
            self._sw_holds.adopt(shares._sw_holds)
        for stage in mine:
            self._sw_holds.take(staged.parts[stage].graph, options)
        check_on_load(self, self._sw_holds.elsewhere)
        written = (buffer for buffer, _ in captured.graph.updates)
        self._sw_updates = tuple(name for name in written if name in self._sw_holds.places)
        make = module_maker(captured, decisions.mesh, inner, device, training)
        program = pipeline_program(staged, decisions.stage_ranks.rank(home, place))
        groups = ChannelGroups(device_mesh, device) if shares is None else shares._sw_channels
        groups.make(pipeline_channels(staged))
        if decisions.separates_gathers:
            groups.agree(one.channel for one in program.transfers())
        self._sw_channels: ChannelGroups = groups
        self._sw_groups = tuple(device_mesh.get_all_groups())
        self._sw_program: PipelineStep = PipelineStep(staged, program, place, groups, make, device)
        fast = captured.graph.numerics.rng == "fast"
        state = random_state(options.seed, 0, torch.device("cpu") if fast else device)
        self.register_buffer("_sw_random", state, persistent=False)
        self.train(training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass without gradients; call it under `torch.no_grad()`.

        Args:
            args: positional arguments of the model: the global batch on every rank.
            kwargs: keyword arguments likewise.

        Returns:
            The loss of the global batch, on every rank.
        """
        if torch.is_grad_enabled():
            raise PipelineError(
                "a pipeline runs forward and backward passes in turns, so it has no loss to call"
                " backward on; use train_step(optimizer, batch), or forward_backward(batch) for"
                " gradients alone, or call it under torch.no_grad() for the loss alone"
            )
        running = self._sw_running()
        loss, _ = running._sw_run(args, kwargs, trains=False)
        self._sw_random = running.get_buffer("_sw_random")
        return running._sw_captured.outputs((loss,), self._sw_device)

    def forward_backward(
        self, batch: Any, on_loss: OnLoss | None = None, scaler: GradScaler | None = None
    ) -> torch.Tensor:
        """Run all passes of the schedule.

        Args:
            batch: the global batch on every rank, as a mapping or a sequence.
            on_loss: called with the loss, after all passes were issued to the device.
            scaler: scales the loss that gradients are computed of.

        Returns:
            The loss of the global batch, on every rank; gradients are added to `grad`.
        """
        args, kwargs = arguments(batch)
        with scaled(self._sw_running()._sw_program, scaler, self._sw_device):
            loss = self.call_backward(*args, **kwargs)
        if on_loss is not None:
            on_loss(loss)
        return loss

    def call_backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run all passes of the schedule for a call with any arguments; return the loss."""
        running = self._sw_running()
        check_gradients(self.parameters())
        loss, gradients = running._sw_run(args, kwargs, trains=True)
        self._sw_random = running.get_buffer("_sw_random")
        for name, gradient in gradients.items():
            parameter = self._sw_holds.tensor(name)
            assert isinstance(parameter, DTensor)
            whole = DTensorSpec(parameter).whole(gradient.view(local(parameter).shape))
            parameter.grad = whole if parameter.grad is None else parameter.grad + whole
        return loss

    def local_batch(self, batch: Any) -> Any:
        """The batch as it is: every rank passes the global batch, and a stage takes its part."""
        return batch

    @property
    def _sw_standing_alone(self) -> bool:
        """Whether its graph is that of training, and runs in evaluation too."""
        return self._sw_modes is None and not self._sw_shares

    @property
    def graph(self) -> Graph:
        """The serial graph, of all stages."""
        return self._sw_graph

    def _sw_run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run the program; the loss of the batch, and the gradients of this rank's tiles."""
        step, holds = self._sw_program, self._sw_holds
        given = step.given(self._sw_form, (args, kwargs), holds, self._sw_device)
        with without_autocast(self._sw_device):
            found = step(given, self.get_buffer("_sw_random"), trains=trains)
        program = step.program
        if self.training or not self._sw_standing_alone:
            with torch.no_grad():
                for buffer, value in program.updates:
                    holds.write(buffer, found[value])
        if self.training or self._sw_draws:
            self._sw_advance()
        (output,) = program.outputs
        named = ((leaf, found.get(value)) for leaf, value in program.gradients)
        return found[output], {leaf: x for leaf, x in named if x is not None}
