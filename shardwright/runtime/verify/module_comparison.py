"""Compares a module, run eagerly, with its captured graph on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, final

import torch
from torch import nn

from shardwright.ir.graph import Graph, LeafKind
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.parameters.matrix_optimizer import ByShape
from shardwright.runtime.parameters.optimizer_hooks import mend_optimizers
from shardwright.runtime.pipeline.runner import PipelineModule
from shardwright.runtime.verify.module_reference import Outcome, loss_of, run_module
from shardwright.runtime.verify.verify_reference import comparable
from shardwright.tracing.call import select_outputs, unflatten
from shardwright.tracing.graph_builder import Captured

TOLERANCE = 1e-8  # of float64 sums in another order, relative to a tensor's largest element
# The least scale of a gradient's error, as a share of the largest gradient of the model.
WIDE_FLOOR, NARROW_FLOOR = 1e-4, 1e-2
Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer | ByShape]
Measured = dict[str, Any]  # loss, outputs; gradients, buffers and parameters by name
OneDevice = Callable[[Graph, Mapping[str, Any]], ParallelModule]


@dataclass(frozen=True)
class ComparedModule:
    """Differences of a module and its captured graph, and the reference of plans.

    `expected` is what the module did, where it was run in float64, else what the graph did.
    `error` is infinite where the module could not be run, and `not_compared` says why. `worst`
    names the tensor that differs most.
    """

    expected: Measured
    error: float
    worst: str
    dtype: str
    ok: bool
    not_compared: str = ""
    notes: tuple[str, ...] = ()


@final
class ModuleComparison:
    """A module and its captured graph, to be run side by side on one batch.

    `payload` holds weights, buffers, constants and the batch in float64 and `batch` the batch as it
    was given; `one_device` makes the serial program of a graph and a payload.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        payload: Mapping[str, Any],
        batch: Mapping[str, torch.Tensor],
        optimizer: Optimizer,
        one_device: OneDevice,
    ) -> None:
        self.model, self.captured = model, captured
        self.payload = {**payload, "opaque": captured.opaque}
        self.batch = batch
        self.optimizer, self.one_device = optimizer, one_device

    def run(self, wide: Graph) -> ComparedModule:
        """Compare everything that a step gives; `wide` is the captured graph in float64.

        Where the module computes something else in float64, or cannot, both sides are run in the
        module's own precision.
        """
        serial, outcome, failure = self._both(wide, self.payload, wide=True)
        if outcome is None:
            compared = ComparedModule(serial, inf, "", "float64", ok=False, not_compared=failure)
        else:
            expected = self._measured(outcome, wide)
            errors = self._errors(expected, outcome, serial, self.payload, floor=WIDE_FLOOR)
            worst = max(errors, key=lambda key: errors[key])
            ok = errors[worst] <= TOLERANCE
            compared = ComparedModule(expected, errors[worst], _name(worst), "float64", ok)
            if ok:
                return compared
            failure = f"{' '.join(worst)} differs by {errors[worst]:.1e}"
        found = self._in_own_precision(serial, failure)
        return found if found is not None and (found.ok or outcome is None) else compared

    def _in_own_precision(self, serial: Measured, failure: str) -> ComparedModule | None:
        """The comparison without float64; None where it would be the same again."""
        dtypes = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        narrowest = max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float64)
        if narrowest is torch.float64 or self.captured.graph.numerics.is_mixed:
            return None
        graph = comparable(self.captured.graph)
        payload = {
            **self.payload,
            "weights": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers(remove_duplicate=False)),
            "constants": self.captured.constants,
            "batch": self.batch,
        }
        own, outcome, reason = self._both(graph, payload, wide=False)
        dtype = str(narrowest).removeprefix("torch.")
        if outcome is None:
            return ComparedModule(serial, inf, "", dtype, ok=False, not_compared=reason)
        expected = self._measured(outcome, graph)
        del expected["parameters"]  # a step of Adam makes large numbers of gradients' rounding
        errors = self._errors(expected, outcome, own, payload, floor=NARROW_FLOOR)
        worst = max(errors, key=lambda key: errors[key])
        note = (
            f"the module was compared with its graph in {dtype}, since in float64 it computes"
            f" otherwise or not at all ({failure})"
        )
        # Half of the digits may be lost to sums in another order, through all layers.
        ok = errors[worst] <= torch.finfo(narrowest).eps ** 0.5
        return ComparedModule(serial, errors[worst], _name(worst), dtype, ok, notes=(note,))

    def _both(
        self, graph: Graph, payload: Mapping[str, Any], *, wide: bool
    ) -> tuple[Measured, Outcome | None, str]:
        """Measurements of graph and module, and the reason if the module cannot be run."""
        module = self.one_device(graph, payload)
        state = module.get_buffer("_sw_random").clone()
        program = module.programs()[0]
        outcome, failure = None, ""
        batch = with_gradients(graph, payload["batch"])
        args, kwargs = unflatten({**dict(graph.constants), **batch})
        try:
            found = run_module(self.model, args, kwargs, program, state, wide=wide)
            gradients = {**found.gradients, **gradients_of(batch)}
            outcome = replace(found, gradients=gradients)
        except Exception as e:  # whatever the user's code raises on tensors of another dtype
            failure = f"{type(e).__name__}: {' '.join(str(e).split())}"
        return measure(module, self.optimizer, payload["batch"]), outcome, failure

    def _measured(self, outcome: Outcome, graph: Graph) -> Measured:
        """Measurements of the module, in the form in which `measure` has those of a plan."""
        self.optimizer(outcome.leaves.values()).step()
        return {
            "loss": outcome.loss,
            "outputs": list(outcome.outputs),
            "gradients": dict(outcome.gradients),
            "buffers": {k: outcome.buffers[k] for k, _ in graph.updates if k in outcome.buffers},
            "parameters": {key: p.detach() for key, p in outcome.leaves.items()},
        }

    def _errors(
        self,
        expected: Measured,
        outcome: Outcome,
        found: Measured,
        payload: Mapping[str, Any],
        floor: float,
    ) -> dict[tuple[str, str], float]:
        """Every error of the graph, by kind and name of the tensor.

        Buffers are compared that the graph leaves alone, too: the module may change them.
        """
        buffers = {**payload["buffers"], **found["buffers"]}
        every = {**expected, "buffers": outcome.buffers}
        return errors_between(every, {**found, "buffers": buffers}, floor)


def errors_between(
    expected: Measured, found: Measured, floor: float
) -> dict[tuple[str, str], float]:
    """Errors of everything in `expected`, by kind and name.

    Each is relative to the tensor's largest element; of gradients to at least `floor` times the
    largest gradient of all, since what cancels to zero is all rounding; of others to at least 1.
    """
    gradients = [g for g in expected["gradients"].values() if g is not None and g.numel()]
    largest = max((float(g.abs().max()) for g in gradients), default=0.0)
    errors = {("loss", ""): error(expected["loss"], found["loss"])}
    for i, (one, other) in enumerate(zip(expected["outputs"], found["outputs"], strict=True)):
        errors["output", str(i)] = error(one, other)
    for kind in ("gradients", "buffers", "parameters"):
        least = floor * largest if kind == "gradients" else 1.0
        for key, value in expected.get(kind, {}).items():
            errors[kind, key] = error(value, found[kind][key], least)
    return errors


def measure(
    module: ParallelModule | PipelineModule, optimizer: Optimizer, batch: Mapping[str, Any]
) -> Measured:
    """One training step of `module`: its loss and outputs, and gradients, buffers and parameters.

    These are whole and go by first names; of a pipeline they are those of this rank's stages, by
    all of their names.
    """
    mend_optimizers()
    steps = optimizer(module.parameters())
    batch = with_gradients(module.graph, batch)
    loss, outputs = _backward(module, batch)
    every = dict(module.named_parameters(remove_duplicate=isinstance(module, ParallelModule)))
    gradients = {key: None if p.grad is None else _whole(p.grad) for key, p in every.items()}
    gradients.update(gradients_of(batch))
    all_buffers = dict(module.named_buffers(remove_duplicate=False))
    buffers = {
        key: all_buffers[key].clone() for key in module.updated_buffers if key in all_buffers
    }
    steps.step()
    return {
        "loss": loss.detach(),
        "outputs": [output.detach() for output in outputs],
        "gradients": gradients,
        "buffers": buffers,
        "parameters": {key: _whole(p.detach()) for key, p in every.items()},
    }


def with_gradients(graph: Graph, batch: Mapping[str, Any]) -> dict[str, Any]:
    """`batch`, by path, with leaves of its own where `graph` has a gradient of the input."""
    found = dict(batch)
    for leaf in graph.leaves_of(LeafKind.INPUT):
        if graph.tensor[leaf.name].requires_grad:
            found[leaf.keys[0]] = batch[leaf.keys[0]].detach().clone().requires_grad_()
    return found


def gradients_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """The gradients of the tensors of a batch that require one."""
    return {key: t.grad for key, t in batch.items() if torch.is_tensor(t) and t.requires_grad}


def merged(results: Sequence[Measured]) -> Measured:
    """Measurements of all stages of a pipeline, as of one module; all know the loss."""
    found = dict(results[0])
    for part in ("gradients", "buffers", "parameters"):
        found[part] = {k: v for result in reversed(results) for k, v in result[part].items()}
    return found


def error(serial: torch.Tensor | None, parallel: torch.Tensor | None, least: float = 1.0) -> float:
    """Largest difference over the largest serial element, or `least`; infinite if one lacks.

    Elements that are the same infinity, or NaN on both sides, are equal.
    """
    if all(one is None or one.numel() == 0 for one in (serial, parallel)):
        return 0.0
    if serial is None or parallel is None:
        return inf
    one, other = serial.reshape(parallel.shape), parallel
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other.to(one.dtype)) else inf
    one, other = one.to(torch.float64), other.to(torch.float64)
    same = (one == other) | (one.isnan() & other.isnan())
    difference = torch.where(same, 0.0, (one - other).abs())
    finite = one.abs()[one.isfinite()]
    scale = max(float(finite.max()) if finite.numel() else 0.0, least) or 1.0
    found = float(difference.max()) / scale
    return found if found == found else inf


def _name(worst: tuple[str, str]) -> str:
    """The tensor's name of an error; outputs have no name of their own."""
    kind, key = worst
    return key if kind in ("gradients", "buffers", "parameters") else f"{kind} {key}".strip()


def _backward(
    module: ParallelModule | PipelineModule, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the outputs, after a backward pass from the loss."""
    args, kwargs = unflatten({**dict(module.graph.constants), **batch})
    if isinstance(module, PipelineModule):
        loss = module.call_backward(*args, **kwargs)
        return loss, [loss]
    outputs = select_outputs(module(*args, **kwargs))[1]
    loss = loss_of(outputs)
    loss.backward()
    return loss, outputs


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole
