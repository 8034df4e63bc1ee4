"""`verify`: compares a plan on real ranks with the module itself, in double precision.

The ranks are local processes that torchrun starts; a single one is this process, because starting
others takes longer than what they do. Three sides are compared, dropout included:
the module run eagerly, its captured graph on one device, and the plan on its ranks. All compute
in float64, so that a difference is a defect and not rounding. A module that computes something
else in float64 is compared with its graph in its own precision.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir.graph import Arg, Graph, Leaf, Op, Source, Symbol
from shardwright.ir.plan import Plan, PlanError, require_plan
from shardwright.plan_io.graph_text import graph_to_json
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.ranks import run_ranks
from shardwright.runtime.verify.module_comparison import (
    TOLERANCE,
    WIDE_FLOOR,
    ComparedModule,
    Measured,
    ModuleComparison,
    errors_between,
    measure,
)
from shardwright.runtime.verify.module_pickling import pack, unpack
from shardwright.runtime.verify.module_reference import widened
from shardwright.runtime.verify.verify_reference import comparable, in_parts, notes
from shardwright.runtime.verify.worker import measured_on_ranks, one_device, optimizer_of
from shardwright.tracing.arguments import require_module
from shardwright.tracing.call import as_planned, flatten
from shardwright.tracing.discovery.discover import capture_with_rules

_WORKER = "shardwright.runtime.verify.worker"
_FLOAT64 = {
    "float32": "float64",
    "float16": "float64",
    "bfloat16": "float64",
    "complex64": "complex128",
    "complex32": "complex128",
}
_OF_DEFAULT_DTYPE = ("empty", "zeros", "ones", "full", "eye", "linspace", "arange")


@dataclass(frozen=True, slots=True)
class Worst:
    """The tensor with the largest error, the operator that reads it, and its source line."""

    tensor: str
    op: str
    source: Source

    def __str__(self) -> str:
        return f"{self.tensor} (read by {self.op}, {self.source})"


@dataclass(frozen=True, slots=True)
class Report:
    """The errors that `verify` found, relative to the largest element of each tensor, at least 1.

    Attributes:
        ok: whether all errors are small.
        loss_error: of the outputs, against one device: the module itself in float64 where that ran,
            else its captured graph.
        max_gradient_error: of the worst gradient, likewise.
        max_buffer_error: of the worst buffer, likewise.
        max_parameter_error: of the worst parameter after one optimizer step, likewise.
        worst: the tensor with the largest error.
        capture_error: of the captured graph against the module, in its own precision; infinite
            where the module could not be run.
        compared_in: the dtype of that comparison.
        devices: number of ranks that ran.
        not_compared: why the module could not be run; empty if it was.
        notes: what was compared in place of what differs from plan to plan.
    """

    ok: bool
    loss_error: float
    max_gradient_error: float
    max_buffer_error: float
    max_parameter_error: float
    worst: Worst
    capture_error: float
    compared_in: str
    devices: int
    not_compared: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.devices} rank{'s' * (self.devices > 1)}"
        errors = (
            f"loss error {self.loss_error:.1e}, gradients {self.max_gradient_error:.1e}, buffers"
            f" {self.max_buffer_error:.1e}, parameters after one optimizer step"
            f" {self.max_parameter_error:.1e}"
        )
        if self.not_compared:
            text = (
                "the module itself was NOT COMPARED with its captured graph:"
                f" {self.not_compared}; of the plan on {ranks} beside the graph on"
                f" one device: {errors}; worst: {self.worst}"
            )
        else:
            word = "equals" if self.ok else "DIFFERS from"
            text = (
                f"the plan on {ranks} {word} one device: {errors}, module against"
                f" graph {self.capture_error:.1e} in {self.compared_in}; worst: {self.worst}"
            )
        return text + "".join(f"\nnote: {note}" for note in self.notes)


def verify(
    model: nn.Module, plan: Plan, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Report:
    """Compare `plan` with `model`: outputs, every gradient and buffer, and one optimizer step.

    Starts one process per device of the plan on this host, none for a single one. The module is run
    eagerly, as it is, on copies of its parameters and buffers; both sides are compared in float64
    where the module allows it.

    Args:
        model: the module that the plan was made for, with values.
        plan: the plan to run.
        args: positional arguments of a call, a global batch with real values. Gradients of those
            that required one when the plan was made are compared too.
        kwargs: keyword arguments of that call.

    Returns:
        The errors, relative to the largest element of each tensor; `ok` where all are small.

    Raises:
        PlanError: the plan is not for this model and batch, or is asynchronous.
    """
    require_module(model)
    require_plan(plan)
    if plan.pipeline is not None and plan.pipeline.weights is not None:
        raise PlanError(
            "an asynchronous plan does not compute what one device computes, so there is nothing to"
            " verify; plan without it, or see docs/how-to/async.md for how to compare training runs"
        )
    args, kwargs = as_planned(plan.inputs, args, kwargs or {})
    captured = capture_with_rules(model, args, kwargs, plan.numerics)
    analysis = analyze(captured.graph)
    decisions = read_plan(plan, captured.graph, analysis)
    if any(p.is_meta for p in model.parameters()):
        raise PlanError("verify needs a model with weights; this one is on the meta device")
    batch = {k: v for k, v in flatten(args, kwargs).items() if isinstance(v, torch.Tensor)}
    graph = comparable(to_float64(captured.graph))
    payload: dict[str, Any] = {
        "graph": graph_to_json(graph),
        "plan": plan_to_json(plan),
        "fingerprint": graph.fingerprint,
        "output_keys": list(captured.output_keys),
        "weights": {k: widened(p) for k, p in model.named_parameters()},
        "buffers": {k: widened(b) for k, b in model.named_buffers(remove_duplicate=False)},
        "constants": {k: widened(c) for k, c in captured.constants.items()},
        "batch": {k: widened(v) for k, v in batch.items()},
    }
    shipped = pack(captured.opaque)
    optimizer = optimizer_of(plan.optimizer)
    comparison = ModuleComparison(model, captured, payload, batch, optimizer, one_device)
    compared = _with_module(comparison, graph, [call.path for call in captured.opaque.values()])
    expected = compared.expected
    if (alone := in_parts(graph, analysis, decisions)) is not graph:
        parts = one_device(alone, {**payload, "opaque": captured.opaque})
        expected = measure(parts, optimizer, payload["batch"])
    if plan.devices == 1 and not dist.is_initialized():
        parallel = _in_this_process({**payload, "opaque": unpack(shipped)})
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(payload, Path(folder) / "payload.pt")
            Path(folder, "modules.pkl").write_bytes(shipped)
            run_ranks(_WORKER, [folder], plan.devices)
            parallel = torch.load(Path(folder) / "result.pt", weights_only=True)
    return _compare(captured.graph, plan, expected, parallel, compared)


def _with_module(comparison: ModuleComparison, graph: Graph, kept: Sequence[str]) -> ComparedModule:
    """The module beside its graph, of which the modules at `kept` are no operators.

    Raises `PlanError` where these do not run in float64.
    """
    try:
        return comparison.run(graph)
    except RuntimeError as e:
        if not kept:
            raise
        raise PlanError(
            "verify runs the model in float64, where a module that is kept whole"
            f" ({', '.join(sorted(kept))}) does not run: {e}; let it make tensors of the dtype of"
            " its input"
        ) from e


def _in_this_process(payload: Mapping[str, Any]) -> Measured:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        return measured_on_ranks(payload)
    finally:
        dist.destroy_process_group()


def _compare(
    graph: Graph, plan: Plan, expected: Measured, parallel: Measured, module: ComparedModule
) -> Report:
    """The report on a plan, from what the graph and the ranks computed."""
    errors = errors_between(expected, parallel, WIDE_FLOOR)
    most = {
        part: max((e for (kind, _), e in errors.items() if kind == part), default=0.0)
        for part in ("loss", "output", "gradients", "buffers", "parameters")
    }
    tensors = {key: e for (kind, key), e in errors.items() if kind in ("gradients", "buffers")}
    worst = max(tensors, key=lambda key: tensors[key], default="")
    if module.worst and not module.ok:
        worst = module.worst
    return Report(
        ok=max(errors.values()) <= TOLERANCE and module.ok,
        loss_error=max(most["loss"], most["output"]),
        max_gradient_error=most["gradients"],
        max_buffer_error=most["buffers"],
        max_parameter_error=most["parameters"],
        worst=_worst(graph, worst),
        capture_error=module.error,
        compared_in=module.dtype,
        devices=plan.devices,
        not_compared=module.not_compared,
        notes=(*notes(graph), *module.notes),
    )


def _worst(graph: Graph, tensor: str) -> Worst:
    leaf: Leaf | None = next((leaf for leaf in graph.leaves if tensor in leaf.keys), None)
    readers = graph.consumers[leaf.name] if leaf else ()
    op = readers[0] if readers else None
    return Worst(tensor, op.name if op else "nothing", op.source if op else Source())


def to_float64(graph: Graph) -> Graph:
    """`graph` with every floating-point value, and every floating-point cast, in float64.

    So errors of a rewrite exceed those of rounding.
    """

    def arg(value: Arg) -> Arg:
        if isinstance(value, Symbol) and value.kind == "dtype":
            return Symbol("dtype", _FLOAT64.get(value.name, value.name))
        if isinstance(value, tuple):
            return tuple(arg(v) for v in value)
        return value

    def op(call: Op) -> Op:
        kwargs = {key: arg(value) for key, value in call.kwargs}
        made = graph.tensor[call.outputs[0]].dtype
        if call.kind in _OF_DEFAULT_DTYPE and made in _FLOAT64:
            kwargs.setdefault("dtype", Symbol("dtype", _FLOAT64[made]))
        return replace(call, args=tuple(arg(a) for a in call.args), kwargs=tuple(kwargs.items()))

    return replace(
        graph,
        ops=tuple(op(call) for call in graph.ops),
        values=tuple(replace(v, dtype=_FLOAT64.get(v.dtype, v.dtype)) for v in graph.values),
    )
