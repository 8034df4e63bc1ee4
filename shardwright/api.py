"""The public functions: capture, search, plan, parallelize, verify."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import Constraint
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.options.optimizers import known_optimizer
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.files.loading import machine_of
from shardwright.machine.model import Machine
from shardwright.planner.arguments import search_scope
from shardwright.planner.memory_limits import STATE, check_limit, check_weights, least_state_bytes
from shardwright.planner.meshes.mesh_turns import Progress
from shardwright.planner.strategies import pricing
from shardwright.planner.strategies.frontier import priced_frontier as strategy_frontier
from shardwright.planner.strategies.preference import preferred
from shardwright.public import Frontier, Plan
from shardwright.public import search_with as search_with
from shardwright.rules.operators.chunks import with_chunks
from shardwright.runtime.parallel import parallelize
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.verify.verify import Report, verify
from shardwright.tracing.arguments import (
    check_loss,
    require_loss,
    require_module,
    weight_bytes,
)
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.op_memory.footprints import Footprints

__all__ = [
    "Frontier",
    "Graph",
    "Machine",
    "ParallelModule",
    "Plan",
    "Progress",
    "Report",
    "Strategy",
    "capture",
    "parallelize",
    "plan",
    "price",
    "search",
    "strategies",
    "verify",
]


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rng: str = "exact",
    batch_norm: str = "exact",
    precision: str = "model",
    reduce: str = "stored",
    norms: str = "fused",
    logits: str = "fused",
    loss: str = "model",
    loss_chunks: int = 1,
    mlp_chunks: int = 1,
) -> Graph:
    """Capture the serial dataflow graph of `model(*args, **kwargs)`.

    Nothing is computed and nothing is allocated: models on the meta device are welcome.

    Args:
        model: the unmodified module. A module that returns a scalar loss (alone, first in a tuple,
            or as `loss` of its output) is captured up to that loss.
        args: positional arguments of one call, an example of the *global* batch. Shapes and dtypes
            become part of the graph; values do not.
        kwargs: keyword arguments of that call.
        rng: `"exact"`: every plan draws the random numbers that one device draws. `"fast"`: torch's
            fused kernels for dropout and attention, whose numbers depend on the plan.
        batch_norm: `"exact"`: statistics of the whole batch. `"local"`: those of each device's part
            of it, as under DistributedDataParallel.
        precision: `"model"`: the model's own dtypes. `"bf16"`: computes in bfloat16 on casts of
            parameters that stay float32, as do sums of gradients and the optimizer. `"fp16"`: in
            float16; training scales the loss (`train_step(optimizer, batch, scaler)`).
        reduce: `"stored"`: devices sum gradients in the dtype in which parameters are stored.
            `"bf16"`, `"fp16"`, with that precision: in 16 bits, which halves what they send.
        norms: `"fused"`: RMS norms of single operators are torch's kernel, which rounds once in
            half precision where they round twice. `"model"`: as the model computes them.
        logits: `"fused"`: a cross entropy of half-precision logits that the model casts to float32
            casts some rows at a time. `"model"`: it reads a copy of all of them.
        loss: `"model"`: the model returns the loss. `"outside"`: the loss is computed outside of it
            from the tensors that it returns.
        loss_chunks: parts of the vocabulary in which the last projection and its cross entropy are
            computed, so that logits of one part exist at a time; `search` chooses it where memory
            is short.
        mlp_chunks: parts of a rank's rows in which MLPs are computed, so that tensors of their
            inner width exist for one part at a time.

    Returns:
        The graph, for `search`.

    Raises:
        LossChunksError, MlpChunksError: loss or MLPs cannot be computed in chunks.
        CaptureError: no fixed graph expresses the model (names the user's file and line), or it
            takes `labels`, gets none and returns no loss.
        BatchError: the arguments are not those of the model.
    """
    check_loss(loss)
    numerics = Numerics(rng, batch_norm, precision, reduce, norms, logits)
    found = capture_with_rules(model, args, kwargs, numerics)
    if loss == "model":
        require_loss(model, args, kwargs or {}, found.output_keys)
    return with_chunks(found.graph, loss_chunks, mlp_chunks)


def search(
    graph: Graph,
    machine: Machine | str,
    optimizer: object = "adamw",
    *,
    method: str = "joint",
    exact: bool = False,
    recompute: bool = True,
    meshes: Sequence[Mesh] | None = None,
    constraints: Sequence[str | Constraint] = (),
    micro_batches: Sequence[int] | str | None = None,
    memory_limit: str | int | None = None,
    stages: Sequence[int] | str | None = "auto",
    allow_async: bool = False,
    loss_chunks: Sequence[int] | None = None,
    mlp_chunks: Sequence[int] | None = None,
    offload: bool | None = None,
    points: int = 48,
    seconds: float = math.inf,
    processes: int = 1,
    progress: Progress | None = None,
) -> Frontier:
    """Search the Pareto frontier of step time and peak memory per rank over all plans.

    Args:
        graph: the model's graph, as `capture` returns it.
        machine: the hardware, or the name of a preset such as `"8xH100"`.
        optimizer: its name, a class of `torch.optim`, an optimizer, or an `OptimizerSpec`.
        method: `"joint"`: the frontier over all axes of a mesh at once. `"kcut"`: one plan,
            SoyBean's: the devices are cut by one prime factor after the other, or along the axes of
            the one mesh in `meshes`, so that the fewest bytes are communicated.
        exact: whether the frontier of the additive costs is exact; then parts of layers may be
            recomputed, too. Without, its supported points are exact, and each plan has a lower
            bound on its time.
        recompute: whether segments of the graph, such as layers, may be recomputed in the backward
            pass.
        meshes: the meshes to search; None: all of one and of two axes over all devices.
        constraints: texts such as `"pin layers.*.mlp=tp:features"`. Plans that break one are left
            out; baselines that break one are shown and never chosen.
        micro_batches: numbers of micro-batches to search. None: 1, and more where `memory_limit`
            makes plans slower or rules all out. `"all"`: 1, 2, 4 and so on while they save memory.
        memory_limit: bytes per rank, or a text such as `"40GiB"`; None: the memory of a device;
            `"unlimited"`: none. It decides about micro-batches, chunks, offload and pipelines only.
        stages: numbers of pipeline stages; `(1,)`: no pipelines; None: powers of two; "auto":
            pipelines around the best uniform strategies, on machines of several hosts, where they
            may be faster; none with `constraints`, `meshes`, `exact`, `allow_async`, `"kcut"` or
            one micro-batch.
        allow_async: whether asynchronous pipelines, which change the optimisation, are searched.
        loss_chunks: numbers of chunks of the loss to search. None: 1, and more where `memory_limit`
            makes plans slower or rules all out.
        mlp_chunks: numbers of chunks of MLPs to search. None: as for `loss_chunks`.
        offload: whether inputs of recomputed segments, and the state of the optimizer, may wait in
            the memory of the host. None: inputs where `memory_limit` makes plans slower or rules
            all out, and state where nothing fits else, on accelerators with a link to their host.
            Unless False, parameters and gradients may, too, where not even that fits.
        points: plans of the frontier that are kept; with hundreds, neighbours are about a per cent
            of memory apart.
        seconds: about how long to search at most, with looser bounds then. Of given meshes the
            remaining ones have only their ends and baselines; of others none is searched once a
            plan fits. Plans of the frontier are simulated when they are asked for.
        processes: how many forked processes may search and compare plans at a time. Their number
            changes no plan. 1: none is forked, which is safe everywhere. More are only forked on
            Linux, and not beside other threads, nor after torch has initialised an accelerator or
            a process group.
        progress: called with what is being done and the part of the search, 0 to 1, that is done.

    Returns:
        The plans that no other plan found beats, fastest first, and the baselines. A lower bound is
        about the meshes, stages and micro-batches that were searched.

    Raises:
        ConstraintError: a constraint means nothing here, or no plan meets it.
        OptimizerError: the optimizer is not known.
        MachineError: there is no such machine.
        OptionsError: an option has a value that it cannot have, or two contradict each other.
        MicroBatchError: the batch cannot be taken in these numbers of micro-batches.
        LossChunksError, MlpChunksError: loss or MLPs cannot be computed in these numbers of chunks.
        PipelineError: there is no pipeline of these numbers of stages.
        GraphError: `graph` is no graph.
    """
    options = PlanOptions.of(
        optimizer=optimizer,
        method=method,
        exact=exact,
        recompute=recompute,
        meshes=meshes,
        constraints=constraints,
        micro_batches=micro_batches,
        memory_limit=memory_limit,
        stages=stages,
        allow_async=allow_async,
        loss_chunks=loss_chunks,
        mlp_chunks=mlp_chunks,
        offload=offload,
        points=points,
        seconds=seconds,
        processes=processes,
    )
    return search_with(graph, machine_of(machine), options, progress).without_deadline()


def price(
    graph: Graph,
    machine: Machine | str,
    strategy: Strategy | str,
    optimizer: object = "adamw",
) -> Plan:
    """Price one uniform strategy: the plan that it is, under the same cost model as a search.

    Args:
        graph: the model's graph, as `capture` returns it.
        machine: the hardware, or the name of a preset such as `"8xH100"`.
        strategy: a `Strategy`, or its text, such as `"dp_shard=8 tp=8 mb=4 ac=full"`.
        optimizer: its name, a class of `torch.optim`, an optimizer, or an `OptimizerSpec`.

    Returns:
        The plan, for `parallelize`, with its memory simulated. It may exceed the memory of a
        device, and has no lower bound.

    Raises:
        StrategyError: the strategy cannot be read, contradicts itself, the model or the machine
            (with the nearest degrees that do not), or has a field that is not yet priced.
        OptimizerError: the optimizer is not known.
        MachineError: there is no such machine.
        GraphError: `graph` is no graph.
    """
    known, wanted = machine_of(machine), pricing.as_strategy(strategy)
    tracer = Footprints(on_cpu=known.backend_spec.device == "cpu")
    return Plan.of(pricing.price(graph, known, wanted, known_optimizer(optimizer), tracer))


def strategies(
    graph: Graph,
    machine: Machine | str,
    optimizer: object = "adamw",
    *,
    tp_across_hosts: bool = False,
    fp8: str | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """Enumerate uniform strategies and return the best of them.

    Args:
        graph: the model's graph, as `capture` returns it.
        machine: the hardware, or the name of a preset such as `"8xH100"`.
        optimizer: its name, a class of `torch.optim`, an optimizer, or an `OptimizerSpec`.
        tp_across_hosts: whether tensor parallelism may reach beyond the innermost links.
        fp8: a recipe of products in 8 bits for all of them, such as `"rowwise"`, which changes
            numerics; `"tensorwise"` and `"rowwise"` are executed, others priced. None: no such
            products.
        progress: called with what is being done and the part of the work, 0 to 1, that is done.

    Returns:
        Their plans, fastest first, each named by the text of its strategy.

    Raises:
        StrategyError: no strategy divides the batch over the devices, or the recipe has no price.
        OptimizerError: the optimizer is not known.
        MachineError: there is no such machine.
        GraphError: `graph` is no graph.
    """
    known = machine_of(machine)
    tracer = Footprints(on_cpu=known.backend_spec.device == "cpu")
    name = known_optimizer(optimizer)
    wide = tp_across_hosts
    return Frontier.of(
        strategy_frontier.strategies(
            graph, known, name, tracer, tp_across_hosts=wide, progress=progress, fp8=fp8
        )
    )


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: Machine | str,
    optimizer: object = "adamw",
    memory_limit: str | int | None = None,
    constraints: Sequence[str | Constraint] = (),
    micro_batches: Sequence[int] | str | None = None,
    stages: Sequence[int] | str | None = "auto",
    allow_async: bool = False,
    loss_chunks: Sequence[int] | None = None,
    mlp_chunks: Sequence[int] | None = None,
    offload: bool | None = None,
    processes: int = 1,
    rng: str = "exact",
    batch_norm: str = "exact",
    precision: str = "model",
    reduce: str = "stored",
    norms: str = "fused",
    logits: str = "fused",
    loss: str = "model",
) -> Plan:
    """Capture, search and choose the fastest plan whose peak memory per rank is within the limit.

    A uniform strategy that is slower by at most one per cent is chosen instead, as it is simpler to
    run anywhere; a note of the plan says so. `Frontier.fastest` gives the fastest itself.

    Args:
        model: the unmodified module, also on the meta device.
        args: positional arguments of one call, an example of the global batch.
        kwargs: keyword arguments of that call.
        machine: the hardware, or the name of a preset such as `"8xH100"`.
        optimizer: its name, a class of `torch.optim`, an optimizer, or an `OptimizerSpec`.
        memory_limit: bytes per rank, or a text such as `"40GiB"`; None: the memory of a device;
            `"unlimited"`: the plan may exceed that, and its notes say so.
        constraints: texts such as `"pin layers.*.mlp=tp:features"`.
        micro_batches: numbers of micro-batches to search; None: more than one where the limit makes
            plans slower or rules all out; `"all"`: every power of two that saves memory.
        stages: numbers of pipeline stages to search; `(1,)`: no pipelines, for loops of your own
            instead of `train_step`; None: climbs over powers of two; "auto": as in `search`.
        allow_async: whether asynchronous pipelines, which change the optimisation, are searched.
        loss_chunks: numbers of chunks of the loss to search; None: more than one where the limit
            makes plans slower or rules all out.
        mlp_chunks: as in `search`.
        offload: as in `search`.
        processes: as in `search`.
        rng: as in `capture`.
        batch_norm: as in `capture`.
        precision: as in `capture`.
        reduce: as in `capture`.
        norms: as in `capture`.
        logits: as in `capture`.
        loss: as in `capture`.

    Returns:
        The plan, for `parallelize`.

    Raises:
        InfeasibleError: no plan fits; `smallest_bytes` is the least memory that would do.
        ConstraintError: a constraint means nothing here, or no plan meets it.
        CaptureError: no fixed graph expresses the model.
        MachineError: there is no such machine.
        OptimizerError: the optimizer is not known.
    """
    options = PlanOptions.of(
        optimizer=optimizer,
        constraints=constraints,
        micro_batches=micro_batches,
        memory_limit=memory_limit,
        stages=stages,
        allow_async=allow_async,
        loss_chunks=loss_chunks,
        mlp_chunks=mlp_chunks,
        offload=offload,
        processes=processes,
    )
    machine, limit = machine_of(machine), options.memory_limit
    search_scope(machine, options)
    require_module(model)
    check_weights(machine, limit, weight_bytes(model), options)
    graph = capture(
        model,
        args,
        kwargs,
        rng=rng,
        batch_norm=batch_norm,
        precision=precision,
        reduce=reduce,
        norms=norms,
        logits=logits,
        loss=loss,
    )
    check_limit(machine, limit, least_state_bytes(graph, machine, options), STATE)
    return Plan.of(preferred(search_with(graph, machine, options), limit).plan)
