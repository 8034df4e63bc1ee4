"""Synchronous pipelines: each rank runs the step program of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import Graph
from shardwright.ir.pipeline import AXIS
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.channels import members
from shardwright.program.step.lower.pipelines.pipeline import pipeline_channels, pipeline_mesh
from shardwright.rules.analysis import Analysis
from shardwright.runtime.backend.base import wait_for
from shardwright.runtime.backend.registry import backend_of
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

Channels = dict[str, dist.ProcessGroup | None]


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
        known: Channels = shares._sw_channels if shares is not None else {}
        self._sw_channels: Channels = _channel_groups(
            pipeline_channels(staged), staged, device_mesh, known, device
        )
        groups = {name: group for name, group in self._sw_channels.items() if group is not None}
        self._sw_groups = (*device_mesh.get_all_groups(), *groups.values())
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
        """The same, of a call with any arguments."""
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


def _channel_groups(
    channels: Sequence[str],
    staged: StagedGraph,
    device_mesh: DeviceMesh,
    known: Mapping[str, dist.ProcessGroup | None],
    device: torch.device,
) -> Channels:
    """The process group of each channel of a pipeline, None where this rank is no member.

    Groups in `known` are reused. Every rank must call this, because all ranks must create all
    groups in the same order. Each direction between two pipeline groups has a communicator of its
    own, so that no message waits for one in the other direction.

    NCCL makes a communicator at the first message of two ranks, where each waits for the other: in
    a step some would wait in a circle, so a first message is sent here, by all in one order.
    """
    mesh, ranks = pipeline_mesh(staged), staged.decisions.stage_ranks
    found: Channels = {name: device_mesh[name].get_group() for name in mesh.names}
    everywhere = device_mesh.mesh.flatten().tolist()
    for channel in channels:
        if channel in known:
            found[channel] = known[channel]
            continue
        some = sorted(members(channel, mesh))
        chains = [
            [everywhere[ranks.rank(group, place)] for group in some] for place in range(ranks.size)
        ]
        found[channel] = dist.new_subgroups_by_enumeration(chains)[0]
        if (group := found[channel]) is not None:
            _connect(group, device)
    return found


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """A message from the first rank of two to the other one."""
    backend, byte = backend_of(group), torch.zeros(1, dtype=torch.uint8, device=device)
    sends = dist.get_rank(group) == 0
    begin = backend.begin_send if sends else backend.begin_receive
    wait_for(begin(group, byte, int(sends)), "a first message")
