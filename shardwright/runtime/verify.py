"""`verify`: a plan on real ranks beside one device, in double precision.

The ranks are local processes that torchrun starts. Both sides run the same
captured graph in float64, dropout included, so what differs is the plan's
doing and not rounding. Whether the graph is what the module computes is
checked too, in the module's own precision.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.capture.build import Captured
from shardwright.capture.call import flatten, select_outputs, unflatten
from shardwright.capture.precision import computing_in, narrowed
from shardwright.ir.graph import Graph, LeafKind, Source, to_json
from shardwright.ir.plan import Plan, PlanError
from shardwright.ir.widen import widen
from shardwright.lower.decisions import Decisions, everything_whole
from shardwright.lower.discover import capture_with_rules
from shardwright.lower.reading import read_plan
from shardwright.rules.analysis import Analysis, analyze
from shardwright.runtime.comparable import comparable, in_parts, notes
from shardwright.runtime.parallel import ParallelModule
from shardwright.runtime.parallel import build as module_of
from shardwright.runtime.pipeline import PipelineModule
from shardwright.runtime.ranks import run_ranks
from shardwright.runtime.shipping import pack

TOLERANCE = 1e-8  # of float64 sums in another order, relative to a tensor's largest element
_WORKER = "shardwright.runtime.verify_worker"
_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("SGD", {"lr": 1e-2}),
    "momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    "sgd_momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 1e-3}),
    "adamw": ("AdamW", {"lr": 1e-3}),
    "nadam": ("NAdam", {"lr": 1e-3}),
    "radam": ("RAdam", {"lr": 1e-3}),
    "adamax": ("Adamax", {"lr": 1e-3}),
    "adagrad": ("Adagrad", {"lr": 1e-2}),
    "rmsprop": ("RMSprop", {"lr": 1e-3}),
}


@dataclass(frozen=True, slots=True)
class Worst:
    """The tensor that differs most, the operator that reads it, and where that stands."""

    tensor: str
    op: str
    source: Source

    def __str__(self) -> str:
        return f"{self.tensor} (read by {self.op}, {self.source})"


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found. Errors are relative to the largest element of each tensor, at least 1.

    `capture_error` is the difference between the module's own loss (or
    outputs) and the captured graph's, in the module's precision; NaN where the
    module cannot be run alone. `notes` say what was compared in the place of what
    differs from plan to plan.
    """

    ok: bool
    loss_error: float
    max_gradient_error: float
    max_parameter_error: float
    worst: Worst
    capture_error: float
    devices: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        word = "equals" if self.ok else "DIFFERS from"
        return (
            f"the plan on {self.devices} ranks {word} one device: loss error {self.loss_error:.1e},"
            f" gradients {self.max_gradient_error:.1e}, parameters after one optimizer step"
            f" {self.max_parameter_error:.1e}, module against graph {self.capture_error:.1e};"
            f" worst: {self.worst}" + "".join(f"\nnote: {note}" for note in self.notes)
        )


def verify(
    model: nn.Module, plan: Plan, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Report:
    """Loss, every gradient and one optimizer step of `plan`, against one device.

    `args` and `kwargs` are a batch with real values. Raises `PlanError` if the
    plan is not for this model and batch.
    """
    if plan.pipeline is not None and plan.pipeline.weights is not None:
        raise PlanError(
            "an asynchronous plan does not compute what one device computes, so there is nothing to"
            " verify; plan without it, or see docs/async.md for how to compare training runs"
        )
    captured = capture_with_rules(model, args, kwargs or {}, plan.habits)
    analysis = analyze(captured.graph)
    decisions = read_plan(plan, captured.graph, analysis)
    if any(p.is_meta for p in model.parameters()):
        raise PlanError("verify needs a model with weights; this one is on the meta device")
    batch = {k: v for k, v in flatten(args, kwargs or {}).items() if isinstance(v, torch.Tensor)}
    graph = comparable(widen(captured.graph))
    payload: dict[str, Any] = {
        "graph": to_json(graph),
        "plan": plan.to_json(),
        "fingerprint": graph.fingerprint,
        "output_keys": list(captured.output_keys),
        "weights": {k: _wide(p) for k, p in model.named_parameters()},
        "buffers": {k: _wide(b) for k, b in model.named_buffers(remove_duplicate=False)},
        "constants": {k: _wide(c) for k, c in captured.constants.items()},
        "batch": {k: _wide(v) for k, v in batch.items()},
    }
    shipped = pack(captured.opaque)
    alone = in_parts(graph, analysis, decisions)
    serial = measure(
        one_device(alone, {**payload, "opaque": captured.opaque}), plan.optimizer, payload["batch"]
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.save(payload, Path(folder) / "payload.pt")
        Path(folder, "modules.pkl").write_bytes(shipped)
        run_ranks(_WORKER, [folder], plan.devices)
        parallel = torch.load(Path(folder) / "result.pt", weights_only=True)
    return _compare(captured.graph, plan, serial, parallel, _capture_error(model, captured, batch))


def build(
    graph: Graph,
    analysis: Analysis,
    payload: Mapping[str, Any],
    decisions: Decisions,
    device_mesh: Any,
) -> ParallelModule | PipelineModule:
    """The module of this rank, or of one device without a device mesh, on the CPU."""
    by_every_name = dict(payload["weights"])
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        by_every_name.update((key, payload["weights"][leaf.keys[0]]) for key in leaf.keys)
    return module_of(
        Captured(
            graph,
            dict(payload["constants"]),
            tuple(payload["output_keys"]),
            payload.get("opaque", {}),
        ),
        analysis,
        decisions,
        weights=by_every_name,
        buffers=payload["buffers"],
        persistent=frozenset(),
        device_mesh=device_mesh,
        device=torch.device("cpu"),
        seed=1,
    )


def one_device(graph: Graph, payload: Mapping[str, Any]) -> ParallelModule:
    """The serial program: every operator whole, nothing communicated."""
    module = build(graph, analyze(graph), payload, everything_whole(graph), None)
    assert isinstance(module, ParallelModule)
    return module


def measure(
    module: ParallelModule | PipelineModule, optimizer: str, batch: Mapping[str, Any]
) -> dict[str, Any]:
    """Loss, gradients and parameters after one step, whole, by the parameters' first names.

    Of a pipeline those of this rank's stages, by all of their names.
    """
    name, options = _OPTIMIZERS[optimizer.lower()]
    steps = getattr(torch.optim, name)(module.parameters(), **options)
    loss = _backward(module, batch)
    every = dict(module.named_parameters(remove_duplicate=isinstance(module, ParallelModule)))
    gradients = {key: None if p.grad is None else _whole(p.grad) for key, p in every.items()}
    steps.step()
    parameters = {key: _whole(p.detach()) for key, p in every.items()}
    return {"loss": loss.detach(), "gradients": gradients, "parameters": parameters}


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all stages of a pipeline measured, as one module's; all know the loss."""
    found: dict[str, Any] = {"loss": results[0]["loss"], "gradients": {}, "parameters": {}}
    for result in reversed(results):
        for part in ("gradients", "parameters"):
            found[part].update(result[part])
    return found


def _backward(module: ParallelModule | PipelineModule, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss, after a backward pass from it."""
    args, kwargs = unflatten(batch)
    if isinstance(module, PipelineModule):
        return module.call_backward(*args, **kwargs)
    returned = module(*args, **kwargs)
    outputs = select_outputs(returned)[1]
    # Outputs that are no loss get one that tells their elements apart.
    loss = sum((_probe(out) for out in outputs if out.is_floating_point()), torch.zeros(()))
    loss.backward()
    return loss


def _probe(out: torch.Tensor) -> torch.Tensor:
    if out.dim() == 0:
        return out
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out * weights).sum()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


def _compare(graph: Graph, plan: Plan, serial: Any, parallel: Any, capture_error: float) -> Report:
    loss_error = _error(serial["loss"], parallel["loss"])
    gradients = {
        key: _error(value, parallel["gradients"][key]) for key, value in serial["gradients"].items()
    }
    parameters = {
        key: _error(value, parallel["parameters"][key])
        for key, value in serial["parameters"].items()
    }
    worst = max(gradients, key=lambda key: gradients[key])
    (leaf,) = (leaf for leaf in graph.leaves if worst in leaf.keys)
    readers = graph.consumers[leaf.name]
    op = readers[0] if readers else None
    errors = (loss_error, max(gradients.values()), max(parameters.values()))
    return Report(
        ok=all(error <= TOLERANCE for error in errors) and not capture_error > 1e-3,
        loss_error=errors[0],
        max_gradient_error=errors[1],
        max_parameter_error=errors[2],
        worst=Worst(worst, op.name if op else "nothing", op.source if op else Source()),
        capture_error=capture_error,
        devices=plan.devices,
        notes=notes(graph),
    )


def _error(serial: torch.Tensor | None, parallel: torch.Tensor | None) -> float:
    """Largest difference, relative to the largest serial element or to 1; infinite if one lacks."""
    if serial is None or parallel is None:
        return 0.0 if serial is parallel else float("inf")
    if serial.numel() == 0:
        return 0.0
    scale = max(1.0, float(serial.abs().max()))
    difference = float((serial.reshape(parallel.shape) - parallel).abs().max())
    return difference / scale if difference == difference else float("inf")


def _capture_error(
    model: nn.Module, captured: Captured, batch: Mapping[str, torch.Tensor]
) -> float:
    """Module against graph, both without dropout, in the module's own precision."""
    if captured.graph.updates:
        return float("nan")  # running the module would change its buffers
    if any(op.kind == "uniform" for op in captured.graph.ops):
        return float("nan")  # the module would draw other numbers
    args, kwargs = unflatten({**dict(captured.graph.constants), **batch})
    payload = {
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
        "constants": captured.constants,
        "output_keys": captured.output_keys,
        "opaque": captured.opaque,
    }
    program = one_device(captured.graph, payload)
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        program.eval()
        habits = captured.graph.habits
        given = unflatten(
            {**dict(captured.graph.constants), **{k: narrowed(v, habits) for k, v in batch.items()}}
        )
        with torch.no_grad():
            with computing_in(model, habits, values=True):
                theirs = select_outputs(model(*given[0], **given[1]))[1]
            ours = select_outputs(program(*args, **kwargs))[1]
    finally:
        for module, mode in modes.items():
            module.training = mode
    return max(_error(a.double(), b.double()) for a, b in zip(theirs, ours, strict=True))
