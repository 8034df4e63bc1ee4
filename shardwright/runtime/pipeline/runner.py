"""Synchronous pipelines: `torch.distributed.pipelining` runs stages that are parallel programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

from shardwright.ir.graph import Graph
from shardwright.ir.pipeline import AXIS
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.rules.analysis import Analysis
from shardwright.runtime.batch import local_inputs
from shardwright.runtime.instruction_modules import module_maker
from shardwright.runtime.parameter_store import ParameterStore, place_in
from shardwright.runtime.parameters.dtensor_spec import Placed
from shardwright.runtime.parameters.state_dicts import check_on_load
from shardwright.runtime.pipeline.pipeline_stage import StagePart
from shardwright.runtime.random.dropout import random_state
from shardwright.runtime.train_module import TrainModule, arguments
from shardwright.tracing.arguments import CallForm
from shardwright.tracing.graph_builder import Captured


@final
class PipelineModule(TrainModule):
    """This rank's stages of a pipeline; `parallelize` builds it for a plan with stages.

    `parameters` and `state_dict` have what lives on this rank's stages, under the module's names. A
    parameter of several stages, such as a tied embedding, is on each of them, and its gradient is
    the sum of theirs.
    """

    def __init__(
        self,
        captured: Captured,
        analysis: Analysis,
        decisions: Decisions,
        *,
        weights: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        persistent: frozenset[str],
        device_mesh: DeviceMesh,
        device: torch.device,
        seed: int = 0,
        training: bool = True,
        shares: PipelineModule | None = None,
    ) -> None:
        super().__init__()
        staged = StagedGraph(captured.graph, analysis, decisions)
        homes = staged.pipeline.homes
        self._sw_groups = tuple(device_mesh.get_all_groups())
        self._sw_graph = captured.graph
        self._sw_shares = shares is not None
        self._sw_captured = captured
        self._sw_form, self._sw_device = CallForm(captured.graph, captured.signature), device
        self._sw_count = decisions.micro_batches
        self._sw_mesh = device_mesh[AXIS]
        self._sw_group = self._sw_mesh.get_group()
        inner = device_mesh[decisions.mesh.names]
        mine = [s for s, home in enumerate(homes) if home == self._sw_mesh.get_local_rank()]
        self._sw_home_of_loss = homes[-1]

        owner = shares or self
        self._sw_holds = ParameterStore(owner, captured, analysis, decisions, inner, device)
        if shares is not None:
            self._sw_holds.adopt(shares._sw_holds)
        for stage in mine:
            self._sw_holds.take(staged.parts[stage].graph, weights, buffers, persistent)
        check_on_load(self, self._sw_holds.elsewhere)
        written = (buffer for buffer, _ in captured.graph.updates)
        self._sw_updates = tuple(name for name in written if name in self._sw_holds.places)
        make = module_maker(captured, decisions.mesh, inner, device, training)
        rank = place_in(inner)
        # Not modules of this one: their parameters are tiles of those that are held here.
        self._sw_parts = tuple(
            StagePart(staged, stage, rank, self._sw_holds, make, device) for stage in mine
        )
        stages = [part.torch_stage(self._sw_mesh, len(homes)) for part in self._sw_parts]
        self._sw_schedule = _schedule(staged.pipeline.schedule, stages, self._sw_count)
        self._sw_shared = _groups(staged, device_mesh)
        (loss,) = captured.graph.outputs
        dtype = getattr(torch, captured.graph.tensor[loss].dtype)
        self._sw_loss = torch.zeros((), dtype=dtype, device=device)
        fast = captured.graph.numerics.rng == "fast"
        state = random_state(seed, 0, torch.device("cpu") if fast else device)
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
        loss = running._sw_run(args, kwargs, backward=False)
        self._sw_random = running.get_buffer("_sw_random")
        return running._sw_captured.outputs((loss,), self._sw_device)

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Run all passes of the schedule.

        Args:
            batch: the global batch on every rank, as a mapping or a sequence.

        Returns:
            The loss of the global batch, on every rank; gradients are added to `grad`.
        """
        args, kwargs = arguments(batch)
        return self.call_backward(*args, **kwargs)

    def call_backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The same, of a call with any arguments."""
        running = self._sw_running()
        loss = running._sw_run(args, kwargs, backward=True)
        self._sw_random = running.get_buffer("_sw_random")
        for name, gradient in running._sw_gradients().items():
            parameter = self._sw_holds.held(name)
            assert isinstance(parameter, DTensor)
            whole = Placed(parameter).whole(gradient)
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

    def programs(self) -> list[fx.GraphModule]:
        """Those of this rank's stages."""
        every = (module for part in self._sw_parts for module in part.modules())
        return [module for module in every if isinstance(module, fx.GraphModule)]

    def train(self, mode: bool = True) -> Self:
        """Switch all stages of this rank."""
        if self._sw_modes is None:
            for part in self._sw_parts:
                part.train(mode)
        return super().train(mode)

    def _sw_run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, backward: bool
    ) -> torch.Tensor:
        """Run the schedule; the loss of the batch."""
        state = self.get_buffer("_sw_random")
        for part in self._sw_parts:
            given = local_inputs(self._sw_form, args, kwargs, part.inputs, self._sw_device)
            part.begin(given, state)
        numbers = torch.arange(self._sw_count)
        run = self._sw_schedule.step if backward else self._sw_schedule.eval
        run(numbers, number=numbers, target=numbers, return_outputs=False)
        if self.training or not self._sw_standing_alone:
            for part in self._sw_parts:
                part.finish()
        if self.training or self._sw_draws:
            self._sw_advance()
        found = [part.loss for part in self._sw_parts if part.loss is not None]
        loss = found[0].clone() if found else self._sw_loss.clone()
        dist.broadcast(loss, group_src=self._sw_home_of_loss, group=self._sw_group)
        return loss

    def _sw_gradients(self) -> dict[str, torch.Tensor]:
        """This rank's tile of the gradient of each parameter that has one, all stages added up."""
        found: dict[str, torch.Tensor] = {}
        for part in self._sw_parts:
            for name, gradient in part.gradients().items():
                if gradient is not None:
                    found[name] = found[name] + gradient if name in found else gradient
        for name, group in self._sw_shared.items():
            if name not in self._sw_holds.places:
                continue
            if name not in found:
                found[name] = torch.zeros_like(local_tile(self._sw_holds.held(name)))
            dist.all_reduce(found[name], group=group)
        return found


def local_tile(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's tile, without gradients."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def _schedule(name: str, stages: list[Any], count: int) -> Any:
    """Torch's schedule of that name. A stage returns a term of the loss: nothing is averaged."""
    made: Any = get_schedule_class(name)
    alone = issubclass(made, PipelineScheduleSingle)
    return made(stages[0] if alone else stages, count, loss_fn=_term, scale_grads=False)


def _term(output: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
    """The last stage has computed its term of the loss."""
    return output


def _groups(staged: StagedGraph, device_mesh: DeviceMesh) -> dict[str, Any]:
    """Per parameter on several groups of devices, the process group of this rank's like there.

    Every rank makes all of these process groups, in the same order.
    """
    homes = staged.pipeline.homes
    everywhere = device_mesh.mesh.reshape(staged.pipeline.groups, -1)
    made: dict[tuple[int, ...], Any] = {}
    found = {}
    for name, stages in staged.holders.items():
        holders = tuple(sorted({homes[stage] for stage in stages}))
        if len(holders) == 1 or not staged.graph.tensor[name].requires_grad:
            continue
        if holders not in made:
            ranks = [
                everywhere[list(holders), place].tolist() for place in range(everywhere.shape[1])
            ]
            made[holders] = dist.new_subgroups_by_enumeration(ranks)[0]
        found[name] = made[holders]
    return found
