"""`ParallelModule`: a drop-in for a module that runs this rank's part of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.graph import Graph, LeafKind
from shardwright.program.decisions import Decisions
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.micro_batches import micro_inputs
from shardwright.program.lower.rank_program import input_layouts
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import optimized
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import micro_batches as micro_batched
from shardwright.runtime.backend.registry import backend_for
from shardwright.runtime.batch import input_parts, local_inputs, replica_of
from shardwright.runtime.comm.channel_groups import ChannelGroups
from shardwright.runtime.comm.equal_ranks import require_own_parts, require_same_batch
from shardwright.runtime.device import without_autocast
from shardwright.runtime.executor.whole_batch import WholeBatch
from shardwright.runtime.graph_modules.fx import to_module
from shardwright.runtime.graph_modules.instruction_modules import module_maker
from shardwright.runtime.micro_batches import MicroBatched
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parameter_store import ParameterStore, place_in
from shardwright.runtime.parameters.dtensor_spec import plain_gradient
from shardwright.runtime.parameters.loss_scaling import scale_of, scaled
from shardwright.runtime.parameters.state_dicts import check_on_load
from shardwright.runtime.random.dropout import random_state
from shardwright.runtime.train_module import OnLoss, TrainModule, arguments
from shardwright.tracing.arguments import BatchError, CallForm
from shardwright.tracing.call import select_outputs
from shardwright.tracing.graph_builder import Captured


class ParallelModule(TrainModule):
    """A drop-in for the captured module that holds this rank's tiles; `parallelize` builds it.

    `state_dict`, `parameters` and hooks are those of `nn.Module`: parameters keep their names and
    shapes and are DTensors, or plain tensors on one device without a process group.
    """

    def __init__(
        self,
        captured: Captured,
        analysis: Analysis,
        decisions: Decisions,
        options: ModuleOptions,
        device_mesh: DeviceMesh | None,
        shares: ParallelModule | None = None,
    ) -> None:
        super().__init__()
        device, training = options.device, options.training
        graph, mesh, tilings = captured.graph, decisions.mesh, decisions.tilings
        rank = place_in(device_mesh)
        self._sw_groups = tuple(device_mesh.get_all_groups()) if device_mesh else ()
        self._sw_first = shares is None  # whether batches of the next call are compared over ranks
        self._sw_first_parts = device_mesh is not None  # the same of the next call with own parts
        self._sw_device = device
        self._sw_graph = graph
        self._sw_updates = tuple(buffer for buffer, _ in graph.updates)
        self._sw_captured = captured
        self._sw_form = CallForm(graph, captured.signature)
        self._sw_coordinate = mesh.coordinate(rank)
        self._sw_whole_rows = self._sw_part_rows = -1  # until calls are declared
        self._sw_batch = "any"

        make = module_maker(captured, mesh, device_mesh, device, training)
        groups = ChannelGroups(device_mesh, device) if shares is None else shares._sw_channels
        self._sw_channels: ChannelGroups = groups
        at: tuple[tuple[int, ...], ...]
        if decisions.micro_batches == 1:
            layouts, at = input_layouts(graph, analysis, mesh, tilings), (self._sw_coordinate,)
            self._sw_inputs = input_parts(graph, analysis, layouts, at)
            step = whole_step(graph, analysis, decisions, rank, in_place)
            step = replace(step, alone_bytes=backend_for(device.type).spec.alone_bytes)
            (forward,) = step.programs
            self._sw_program: WholeBatch | MicroBatched = WholeBatch(
                lower_step(step),
                to_module(forward, device, make),
                graph,
                groups,
                make,
                device,
            )
        else:
            micro = micro_batched(graph, analysis, decisions.micro_batches)
            layouts = micro_inputs(graph, analysis, micro, mesh, tilings)
            at = tuple((i, *self._sw_coordinate) for i in range(micro.count))
            self._sw_inputs = input_parts(graph, analysis, layouts, at)
            step = micro_batched_step(graph, analysis, micro, decisions, rank, in_place)
            step = replace(step, alone_bytes=backend_for(device.type).spec.alone_bytes)
            in_parts = optimized(lower_step(step))
            parts = {
                leaf.name: self._sw_inputs[leaf.keys[0]] for leaf in graph.leaves_of(LeafKind.INPUT)
            }
            self._sw_program = MicroBatched(in_parts, parts, graph, groups, make, device)
        if decisions.separates_gathers and device_mesh is not None:
            groups.agree(one.channel for one in self._sw_program.program.transfers())
        owner = shares or self
        self._sw_holds = ParameterStore(owner, captured, analysis, decisions, device_mesh, device)
        if shares is not None:
            self._sw_holds.adopt(shares._sw_holds)
        self._sw_holds.take(graph, options)
        check_on_load(self, tuple)
        # Generators are seeded on the host, which would wait for a state on the device.
        state = random_state(
            options.seed, 0, torch.device("cpu") if graph.numerics.rng == "fast" else device
        )
        self.register_buffer("_sw_random", state, persistent=False)
        self.train(training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; `loss.backward()` runs the backward pass with its collectives.

        Args:
            args: positional arguments of the model: the global batch on every rank, or what
                `local_batch` returned.
            kwargs: keyword arguments likewise.

        Returns:
            The loss of the global batch, or what the module returned.

        Raises:
            BatchError: shapes or dtypes are not those of the plan.
        """
        self._sw_last_rows = self._sw_rows(args, kwargs)
        running = self._sw_running(self._sw_last_rows)
        found = running._sw_run(args, kwargs)
        if running is not self:
            self._sw_random = running.get_buffer("_sw_random")
        return found

    def _sw_declare(self, batch: str) -> None:
        """Say what calls pass: the `"global"` batch, the `"local"` part, or `"any"` of them."""
        shapes = self._sw_form.shapes
        key = next((key for key, shape in shapes.items() if shape), None)
        if key is not None:
            self._sw_whole_rows = self._sw_part_rows = shapes[key][0]
            if batch != "global" and key in self._sw_inputs:
                self._sw_part_rows = self._sw_inputs[key].shape[0]
        self._sw_batch = batch

    def _sw_rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Rows of a global batch that has fewer than planned; None for the planned one.

        None also for a call that differs in more, which is refused where it runs.
        """
        if torch.compiler.is_compiling():
            return None
        every = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim())
        first = len(next(every, ()))
        whole, part = self._sw_whole_rows, self._sw_part_rows
        if first == part or (first == whole and self._sw_batch != "local"):
            return None
        counts = set()
        for key, tensor in self._sw_form.inputs(args, kwargs).items():
            planned = self._sw_form.shapes[key]
            if planned[:1] == (whole,) and tensor.shape[1:] == planned[1:]:
                counts.add(len(tensor))
            elif tensor.shape != planned:
                return None
        if len(counts) != 1:
            return None
        (rows,) = counts
        if self._sw_batch == "local":
            if rows >= part or whole % part:
                raise BatchError(
                    f"the batch has {rows} rows, and batch='local' says that each rank passes its"
                    f" part, {part} rows of {whole}"
                )
            rows *= whole // part
        return rows if 0 < rows < whole else None

    def _sw_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call, in the mode of this graph."""
        if self._sw_first and not torch.compiler.is_compiling():
            self._sw_first = False
            if self._sw_groups:
                require_same_batch(self._sw_global(args, kwargs), self._sw_groups)
        given = local_inputs(self._sw_form, args, kwargs, self._sw_inputs, self._sw_device)
        if self._sw_first_parts and not torch.compiler.is_compiling():
            parts = {k: given[k] for k, part in self._sw_inputs.items() if part.was_local}
            if parts:
                self._sw_first_parts = False
                named = {self._sw_form.names[k]: x for k, x in parts.items()}
                require_own_parts(named, self._sw_groups)
        copies = not isinstance(self._sw_program, WholeBatch)  # which copies what it must
        leaves = self._sw_holds.leaves(self._sw_graph, given, copies=copies)
        state = self._sw_state
        with without_autocast(self._sw_device):
            results = self._sw_program(*leaves, state)
        outputs = results[: len(self._sw_graph.outputs)]
        if self._sw_graph.updates:
            with torch.no_grad():
                self._sw_holds.update(self._sw_graph, results[len(outputs) :])
        if self.training or self._sw_draws:
            self._sw_advance()
        if self._sw_groups and not torch.compiler.is_compiling():
            for output in outputs:
                if output.requires_grad:
                    output.register_hook(plain_gradient)
        return self._sw_captured.outputs(outputs, self._sw_device)

    def _sw_global(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a call that are those of the global batch, by the argument's name."""
        form, graph = self._sw_form, self._sw_graph
        shapes = {
            leaf.keys[0]: graph.tensor[leaf.name].shape for leaf in graph.leaves_of(LeafKind.INPUT)
        }
        return {
            form.names[key]: tensor
            for key, tensor in form.inputs(args, kwargs).items()
            if tuple(tensor.shape) == shapes.get(key)
        }

    def forward_backward(
        self, batch: Any, on_loss: OnLoss | None = None, scaler: GradScaler | None = None
    ) -> torch.Tensor:
        """Run forward and backward pass.

        Args:
            batch: the global batch, or this rank's part of it, as a mapping or a sequence.
            on_loss: called with the loss once it is issued to the device, which is before the
                backward pass unless the loss is reduced during it, or in micro-batches.
            scaler: scales the loss that gradients are computed of.

        Returns:
            The loss of the global batch, a scalar; its gradients are added to `grad`.
        """
        args, kwargs = arguments(batch)
        program = self._sw_running(self._sw_rows(args, kwargs))._sw_program
        if not isinstance(program, WholeBatch):
            with scaled(program, scaler, self._sw_device):
                return self._sw_forward_and_backward(args, kwargs, on_loss)
        reported = False

        def early(loss: torch.Tensor) -> None:
            nonlocal reported
            if on_loss is not None and not program.returns_late():
                on_loss(loss)
                reported = True

        with program.whole_steps():
            found = self._sw_forward_and_backward(args, kwargs, early, scaler)
        if on_loss is not None and not reported:
            on_loss(found)
        return found

    def _sw_forward_and_backward(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        on_loss: OnLoss | None,
        scaler: GradScaler | None = None,
    ) -> torch.Tensor:
        """One call and its backward pass; the loss, detached."""
        returned = self(*args, **kwargs)
        (loss, *others) = select_outputs(returned)[1]
        if others or loss.dim() > 0:
            raise BatchError(
                "train_step needs a module that returns its loss; this one returns"
                f" {type(returned).__name__}: compute the loss inside the module, or step by hand"
            )
        if on_loss is not None:
            on_loss(loss.detach())
        loss.backward(None if scaler is None else scale_of(scaler, loss.device).to(loss))
        return loss.detach()

    @property
    def graph(self) -> Graph:
        """The serial graph that it runs its part of."""
        return self._sw_graph

    @property
    def sampler_kwargs(self) -> dict[str, int]:
        """`num_replicas` and `rank` of a `DistributedSampler` for calls with `batch="local"`.

        Raises `BatchError` where a rank's part is no whole rows, as of a split sequence.
        """
        first = next((one for one in self._sw_inputs.values() if one.whole_shape), None)
        if first is None:
            raise BatchError("the plan's call has no batch to take a part of")
        index, count = replica_of(self._sw_inputs, first.whole_shape[0], first.shape[0])
        return {"num_replicas": count, "rank": index}

    def local_batch(self, batch: Any) -> Any:
        """Cut this rank's part out of a global batch, for loaders that read only their own samples.

        Args:
            batch: the global batch, as a mapping or a sequence.

        Returns:
            The same structure with this rank's tiles; the module takes global and local batches
                alike.
        """

        def part(key: str, tensor: torch.Tensor) -> torch.Tensor:
            return self._sw_inputs[key].of(tensor, self._sw_form.names[key])

        args, kwargs = self._sw_form.mapped(*arguments(batch), part)
        return kwargs if isinstance(batch, Mapping) else args
