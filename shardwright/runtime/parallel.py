"""`parallelize`: turns a module and a plan into a drop-in module that runs its part of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Plan, PlanError, require_plan
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.program.decisions import Decisions
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.micro_batches import micro_inputs
from shardwright.program.lower.rank_program import input_layouts
from shardwright.program.passes import without_regathers
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import optimized
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.micro_batches import micro_batches as micro_batched
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.backend.registry import backend_for
from shardwright.runtime.batch import input_parts, local_inputs
from shardwright.runtime.comm.equal_ranks import (
    require_own_parts,
    require_same_batch,
    warn_of_other_weights,
)
from shardwright.runtime.deferred.sources import RecordedSources, give_memory, with_sources
from shardwright.runtime.device import default_device, without_autocast
from shardwright.runtime.executor.whole_batch import WholeBatch
from shardwright.runtime.graph_modules.fx import to_module
from shardwright.runtime.graph_modules.instruction_modules import module_maker
from shardwright.runtime.micro_batches import MicroBatched
from shardwright.runtime.model_values import Stored, with_values
from shardwright.runtime.modes import Modes, recapture
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parameter_store import ParameterStore, place_in
from shardwright.runtime.parameters.dtensor_access import mend_dtensors
from shardwright.runtime.parameters.dtensor_spec import plain_gradient
from shardwright.runtime.parameters.optimizer_hooks import mend_optimizers, remember
from shardwright.runtime.parameters.state_dicts import check_on_load
from shardwright.runtime.pipeline.runner import PipelineModule
from shardwright.runtime.pipeline.stage import Stages
from shardwright.runtime.plan_transfer import plan_for_graph
from shardwright.runtime.random.dropout import random_state
from shardwright.runtime.train_module import TrainModule, arguments
from shardwright.runtime.weight_files.pretrained import PretrainedForm
from shardwright.runtime.weight_versions import weights_named
from shardwright.tracing.arguments import BatchError, CallForm
from shardwright.tracing.call import example_call, select_outputs
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.export.opaque import WeightsNeededError
from shardwright.tracing.graph_builder import Captured


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
    outputs: str = "loss",
    tune_host: bool = False,
    init: Callable[[nn.Module], object] | str | None = None,
    weights: Stored = None,
) -> ParallelModule | PipelineModule | AsyncPipeline:
    """Build the part of `model` that this rank runs under `plan`.

    Call it on every rank of an initialised process group of `plan.devices` processes, with equal
    weights. A plan for one device needs no process group, and its parameters are plain tensors.

    Args:
        model: the module that the plan was made for, or a function that builds it. Of the tensors
            that a function makes, and of a module on the meta device, no rank ever has more than
            its own tiles and a chunk of 16 MiB, or one whole parameter where its numbers cannot be
            drawn in parts. A function gives them the values that it would give them on the CPU.
        plan: as `plan` or `Frontier.fastest` returns it, or `Plan.load` reads it.
        seed: what dropout masks are drawn from; equal on all ranks.
        device: where parameters and batches go. None: this rank's GPU (`LOCAL_RANK`, or what was
            made current) if the process group joins GPUs; without a group, where the model is.
        outputs: `"loss"`: a call returns the loss, where the model has one. `"model"`: it returns
            what the model returns, each tensor whole and of the global batch, on every rank.
        tune_host: whether ranks on CPUs change how the host runs this process, until it ends: freed
            memory stays in the process, Gloo's threads are scheduled as `SCHED_BATCH`, and waits
            for small collectives spin for some milliseconds before they sleep. Steps are faster
            then; on GPUs nothing changes.
        init: a function that gives the tensors of a module on the meta device their values, in
            place. `"reset_parameters"`: the method of that name of every module, children first.
            None: `model.init_weights()`, where there is one.
        weights: files with the state dict of a function's module or of one on the meta device: a
            safetensors file, a folder that `save_pretrained` or `torch.distributed.checkpoint`
            wrote, or a state dict that `torch.save` wrote; `StoredWeights` where keys differ. Each
            rank reads its tiles. Buffers that are no part of a state dict are as without files.

    Returns:
        A drop-in module. With pipeline stages it trains by `train_step` or `forward_backward`;
            under an asynchronous plan it does not train as one device does.

    Raises:
        PlanError: the plan is not for this model, a parameter or buffer has no values, ranks would
            draw different ones, or there are not as many ranks as the plan has devices.
        CheckpointError: the files cannot be read, or are of another model: the first key that is
            missing or not expected, or tensor of another shape or dtype, is named before one is
            read.
    """
    _check_given(plan, seed, outputs)
    # Before the first collective: NCCL's are on the current GPU, which this may set.
    device = _device(device, model if isinstance(model, nn.Module) else None)
    built, sources = with_values(model, init, weights)
    with with_sources(built, sources):
        try:
            found = _parallelized(built, plan, seed, device, outputs, tune_host)
        except WeightsNeededError:  # to run a sub-module that is kept whole
            if sources is None:
                raise
            give_memory(built, sources)
            found = _parallelized(built, plan, seed, device, outputs, tune_host)
    found._sw_saved = PretrainedForm.of(built)
    if isinstance(sources, RecordedSources):
        sources.finish()
    return found


def _parallelized(
    model: nn.Module,
    plan: Plan,
    seed: int,
    device: torch.device,
    outputs: str,
    tune_host: bool,
) -> ParallelModule | PipelineModule | AsyncPipeline:
    args, kwargs = example_call(plan.inputs, plan.constants)
    captured = capture_with_rules(model, args, kwargs, plan.numerics)
    analysis = analyze(captured.graph)
    decisions = read_plan(plan, captured.graph, analysis)
    if outputs == "model":
        captured = _all_outputs(model, plan, captured.graph)
        plan = plan_for_graph(plan, captured.graph, args, kwargs, recomputed=True)
        analysis = analyze(captured.graph)
        decisions = read_plan(plan, captured.graph, analysis)
    if plan.mesh.size > 1:
        _check_world(plan.mesh)
        warn_of_other_weights(dict(model.named_parameters()))
    backend = backend_for(device.type)
    if tune_host:
        backend.tune_host()
    mend_optimizers()
    mend_dtensors()
    remember(model)
    found: ParallelModule | PipelineModule | AsyncPipeline
    if plan.pipeline is not None and plan.pipeline.weights is not None:
        found = _asynchronous(captured, analysis, decisions, plan, model, device, seed)
    else:
        device_mesh = _device_mesh(plan.mesh, device)
        options = ModuleOptions.of(model, device, seed)
        found = build(captured, analysis, decisions, options, device_mesh)
        found._sw_mirror(model)
        spare = replace(options, weights={}, buffers=_spare_buffers(found, model, captured))
        switch = _in_another_mode(plan, (args, kwargs), spare, device_mesh)
        capture = recapture(captured.graph, outputs)
        found._sw_set_modes(Modes(found, model, captured, capture, switch))
    backend.tune_new_groups()
    return found


def _in_another_mode(
    plan: Plan,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    options: ModuleOptions,
    device_mesh: DeviceMesh | None,
) -> Callable[[Captured, Any], nn.Module]:
    """Builds the module of `call` captured in another mode, with the parameters of an owner."""

    def built(other: Captured, owner: Any) -> nn.Module:
        args, kwargs = call
        changed = plan_for_graph(plan, other.graph, args, kwargs)
        analysis = analyze(other.graph)
        decisions = read_plan(changed, other.graph, analysis)
        return build(other, analysis, decisions, options, device_mesh, owner)

    return built


def _check_given(plan: Plan, seed: object, outputs: object) -> None:
    """Raise an error that names the argument of `parallelize` for one that cannot be."""
    require_plan(plan)
    if not isinstance(seed, int):
        raise PlanError(f"seed is {seed!r}; give a whole number")
    if outputs not in ("loss", "model"):
        raise PlanError(f"outputs is {outputs!r}; choose 'loss', or 'model' for all it returns")


def _spare_buffers(
    built: ParallelModule | PipelineModule, model: nn.Module, captured: Captured
) -> dict[str, torch.Tensor]:
    """Copies of the buffers that the captured graph does not read and `built` does not keep."""
    read = {key for leaf in captured.graph.leaves for key in leaf.keys}
    values = ModuleOptions.of(model, torch.device("cpu"))
    unread = {n: values.valued(n, b) for n, b in model.named_buffers() if n not in read}
    if isinstance(built, ParallelModule):
        built._sw_holds.keep(unread, frozenset(model.state_dict()))
        return {}
    return {name: b.detach().clone() for name, b in unread.items()}


def _all_outputs(model: nn.Module, plan: Plan, graph: Graph) -> Captured:
    """The planned call, of which `graph` is the loss, with all that the model returns."""
    found = recapture(graph, "model")(model)
    if len(found.graph.outputs) > 1 and (plan.pipeline is not None or plan.micro_batches > 1):
        how = "pipeline stages" if plan.pipeline is not None else "micro-batches"
        raise PlanError(
            f"the plan has {how}, which return the loss alone, and the model returns"
            f" {len(found.graph.outputs)} tensors; leave outputs='model' out, or plan with"
            " stages=(1,) and micro_batches=(1,)"
        )
    return found


def _device(given: torch.device | str | None, model: nn.Module | None) -> torch.device:
    """The device itself, by its name, or the default; raises `PlanError` for another name."""
    if given is None:
        return default_device(model)
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as e:
        raise PlanError(f"device is {given!r}; give a torch.device, or 'cpu' or 'cuda:0'") from e


def build(
    captured: Captured,
    analysis: Analysis,
    decisions: Decisions,
    options: ModuleOptions,
    device_mesh: DeviceMesh | None,
    shares: Any = None,
) -> ParallelModule | PipelineModule:
    """The module of what was decided; it `shares` the parameters of another one, if given."""
    if decisions.pipeline is None:
        return ParallelModule(captured, analysis, decisions, options, device_mesh, shares)
    if device_mesh is None:
        raise PlanError("a plan with pipeline stages needs a process group; start with torchrun")
    return PipelineModule(captured, analysis, decisions, options, device_mesh, shares)


def _asynchronous(
    captured: Captured,
    analysis: Analysis,
    decisions: Decisions,
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    seed: int,
) -> AsyncPipeline:
    assert plan.pipeline is not None and plan.pipeline.weights is not None
    _check_world(plan.mesh)
    try:
        stages = Stages.planned(captured, analysis, decisions)
    except PipelineError as e:
        raise PlanError(f"the plan cannot run: {e}") from e
    shared = plan.layout_mesh.size > 1
    return AsyncPipeline(
        stages,
        model,
        weights_named(plan.pipeline.weights),
        device=device,
        device_mesh=_device_mesh(plan.mesh, device) if shared else None,
        seed=seed,
    )


def _device_mesh(mesh: Mesh, device: torch.device) -> DeviceMesh | None:
    if mesh.size == 1 and not dist.is_initialized():
        return None
    _check_world(mesh)
    return init_device_mesh(device.type, mesh.shape, mesh_dim_names=mesh.names)


def _check_world(mesh: Mesh) -> None:
    """Raise `PlanError` unless there are as many processes as the plan has devices."""
    world = dist.get_world_size() if dist.is_initialized() else 0
    if world != mesh.size:
        started = f"are {world} processes" if world else "is no process group"
        raise PlanError(
            f"the plan is for {mesh.size} devices ({mesh}) but there {started}; start it with"
            f" torchrun --nproc-per-node {mesh.size}, or plan for {world or 1}"
        )


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
        self._sw_first = shares is None  # whether its first call is to come
        self._sw_unsplit = device_mesh is not None  # whether the first call with own parts is
        self._sw_device = device
        self._sw_graph = graph
        self._sw_updates = tuple(buffer for buffer, _ in graph.updates)
        self._sw_captured = captured
        self._sw_form = CallForm(graph, captured.signature)
        self._sw_coordinate = mesh.coordinate(rank)

        make = module_maker(captured, mesh, device_mesh, device, training)
        groups = {}
        if device_mesh is not None:
            groups = {name: device_mesh[name].get_group() for name in mesh.names}
        at: tuple[tuple[int, ...], ...]
        if decisions.micro_batches == 1:
            layouts, at = input_layouts(graph, analysis, mesh, tilings), (self._sw_coordinate,)
            self._sw_inputs = input_parts(graph, analysis, layouts, at)
            step = whole_step(graph, analysis, decisions, rank, in_place)
            step = replace(step, alone_bytes=backend_for(device.type).spec.alone_bytes)
            (forward,) = step.programs
            self._sw_program: WholeBatch | MicroBatched = WholeBatch(
                lower_step(step),
                to_module(without_regathers(forward), device, make),
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
        running = self._sw_running()
        found = running._sw_run(args, kwargs)
        if running is not self:
            self._sw_random = running.get_buffer("_sw_random")
        return found

    def _sw_run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call, in the mode of this graph."""
        if self._sw_first and not torch.compiler.is_compiling():
            self._sw_first = False
            if self._sw_groups:
                require_same_batch(self._sw_global(args, kwargs))
        given = local_inputs(self._sw_form, args, kwargs, self._sw_inputs, self._sw_device)
        if self._sw_unsplit and not torch.compiler.is_compiling():
            parts = {k: given[k] for k, part in self._sw_inputs.items() if part.was_local}
            if parts:
                self._sw_unsplit = False
                require_own_parts({self._sw_form.names[k]: x for k, x in parts.items()})
        leaves = self._sw_holds.leaves(self._sw_graph, given)
        state = self.get_buffer("_sw_random")
        with without_autocast(self._sw_device):
            results = self._sw_program(*leaves, state)
        outputs = results[: len(self._sw_graph.outputs)]
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

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """Run forward and backward pass.

        Args:
            batch: the global batch, or this rank's part of it, as a mapping or a sequence.

        Returns:
            The loss of the global batch, a scalar; its gradients are added to `grad`.
        """
        args, kwargs = arguments(batch)
        program = self._sw_running()._sw_program
        with program.whole_steps() if isinstance(program, WholeBatch) else nullcontext():
            return self._sw_there_and_back(args, kwargs)

    def _sw_there_and_back(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        returned = self(*args, **kwargs)
        (loss, *others) = select_outputs(returned)[1]
        if others or loss.dim() > 0:
            raise BatchError(
                "train_step needs a module that returns its loss; this one returns"
                f" {type(returned).__name__}: compute the loss inside the module, or step by hand"
            )
        loss.backward()
        return loss.detach()

    @property
    def graph(self) -> Graph:
        """The serial graph that it runs its part of."""
        return self._sw_graph

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
