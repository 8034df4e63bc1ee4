"""`parallelize`: turns a module and a plan into a drop-in module that runs its part of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Plan, PlanError, require_plan
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.schedules.weight_versions import weights_named
from shardwright.program.decisions import Decisions
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.operators.loss_chunks import LINEAR_CROSS_ENTROPY
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.backend.registry import backend_for
from shardwright.runtime.comm.equal_ranks import warn_of_other_weights
from shardwright.runtime.deferred.sources import RecordedSources, give_memory, with_sources
from shardwright.runtime.device import default_device, permit_tf32
from shardwright.runtime.model_values import Stored, with_values
from shardwright.runtime.modes import Modes, recapture, with_rows
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.parameters.dtensor_access import mend_dtensors
from shardwright.runtime.parameters.optimizer_hooks import mend_optimizers, remember
from shardwright.runtime.parameters.update_groups import update_in_groups
from shardwright.runtime.pipeline.runner import PipelineModule
from shardwright.runtime.pipeline.stage import Stages
from shardwright.runtime.plan_transfer import plan_for_graph
from shardwright.runtime.sharded_ops.fp8_linear import require_8_bit
from shardwright.runtime.weight_files.pretrained import PretrainedForm
from shardwright.tracing.call import example_call
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
    batch: str = "any",
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
        plan: as `plan` or `Frontier.fastest` returns it, or `Plan.load` reads it. One with compiled
            layers (`compile=regional`) runs through `torch.compile`.
        seed: what dropout masks are drawn from; equal on all ranks.
        device: where parameters and batches go. None: this rank's GPU (`LOCAL_RANK`, or what was
            made current) if the process group joins GPUs; without a group, where the model is.
        outputs: `"loss"`: a call returns the loss, where the model has one. `"model"`: it returns
            what the model returns, each tensor whole and of the global batch, on every rank.
        batch: what each rank passes to a call. `"global"`: the whole batch, always. `"local"`: its
            part of the batch, always, as `local_batch` cuts it or a `DistributedSampler` gives it.
            `"any"`: either, by its shape. A batch of fewer rows than planned has a graph of its
            own, captured at its first call; with `"any"` one of as many rows as a part is a part.
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
            draw different ones, there are not as many ranks as the plan has devices, or it has
            products in 8 bits, and the GPU has none.
        CheckpointError: the files cannot be read, or are of another model: the first key that is
            missing or not expected, or tensor of another shape or dtype, is named before one is
            read.
    """
    _check_given(plan, seed, outputs, batch)
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
    if isinstance(found, ParallelModule):
        found._sw_declare(batch)
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
    """The module that runs `plan`, with parameters that are not loaded yet."""
    if plan.numerics.fp8:
        require_8_bit(device)
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
    permit_tf32(device, plan.numerics)
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
        update_in_groups(found, found._sw_program.update_parts)
        spare = replace(options, weights={}, buffers=_spare_buffers(found, model, captured))
        switch = _in_another_mode(plan, spare, device_mesh)
        capture = recapture(captured.graph, outputs)
        found._sw_set_modes(Modes(found, model, captured, capture, switch))
        if plan.compiled:
            found.compile_programs()
    backend.tune_new_groups()
    return found


def _in_another_mode(
    plan: Plan, options: ModuleOptions, device_mesh: DeviceMesh | None
) -> Callable[[Captured, Any, int | None], nn.Module]:
    """Builds the module of a call captured in another mode, or with fewer rows, of an owner."""

    def built(other: Captured, owner: Any, rows: int | None) -> nn.Module:
        args, kwargs = example_call(with_rows(plan.inputs, rows), plan.constants)
        trained = rows is not None and owner.training  # whose memory recomputing saves
        changed = plan_for_graph(plan, other.graph, args, kwargs, recomputed=trained)
        analysis = analyze(other.graph)
        decisions = read_plan(changed, other.graph, analysis)
        made = build(other, analysis, decisions, options, device_mesh, owner)
        if rows is not None and isinstance(made, ParallelModule):
            made._sw_first = True  # so that its first batches are compared over all ranks
        return made

    return built


def _check_given(plan: Plan, seed: object, outputs: object, batch: object) -> None:
    """Raise an error that names the argument of `parallelize` for one that cannot be."""
    require_plan(plan)
    if not isinstance(seed, int):
        raise PlanError(f"seed is {seed!r}; give a whole number")
    if outputs not in ("loss", "model"):
        raise PlanError(f"outputs is {outputs!r}; choose 'loss', or 'model' for all it returns")
    if batch not in ("any", "global", "local"):
        raise PlanError(f"batch is {batch!r}; choose 'global', 'local', or 'any' for either")
    if batch != "any" and plan.pipeline is not None:
        raise PlanError("stages of a pipeline take either batch by its shape; leave batch out")


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
    found = recapture(graph, "model")(model, None)
    chunks = graph.numerics.loss_chunks
    if chunks > 1 and not any(op.target == LINEAR_CROSS_ENTROPY for op in found.graph.ops):
        raise PlanError(
            f"the plan computes the loss in {chunks} chunks and never has all logits, which the"
            " model returns; leave outputs='model' out, or plan with loss_chunks=(1,)"
        )
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
    """The asynchronous pipeline that runs `plan`."""
    assert plan.pipeline is not None and plan.pipeline.weights is not None
    if plan.numerics.precision == "fp16":
        raise PlanError(
            "precision='fp16' scales the loss and skips updates on all ranks together, which"
            " asynchronous stages do not make together; plan with precision='bf16', or without"
            " allow_async"
        )
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
