"""One device: the step program of several plans against the module itself, on the GPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from scripts.gpu_check.models import SMALL, Batch, Found, Loss, made

STRATEGIES = ("mb=1", "mb=4", "ac=full", "mb=2 ac=every(2)", "ac=full offload=activations")
FLOAT64, ROUTED = 1e-10, 1e-6  # routers of mixtures compute in float32 whatever the dtype


def float64(device: torch.device) -> Found:
    """Errors of loss and gradients in float64, by model and strategy; all must be tiny."""
    for name in SMALL:
        model, batch = made(name, device, torch.float64)
        loss, gradients = reference(model, batch)
        for strategy in strategies_of(name):
            parallel = planned(model, batch, strategy, device)
            error = worst_error(parallel, batch, loss, gradients)
            yield f"{name}: {strategy}", error, too_large(error, limit_of(name))


def bf16(device: torch.device) -> Found:
    """Errors of pure bf16 models, of the plan and of the module, against float64."""
    for name in SMALL:
        wide, wide_batch = made(name, device, torch.float64)
        narrow, batch = made(name, device, torch.bfloat16)
        wide.load_state_dict({k: v.double() for k, v in narrow.state_dict().items()})
        loss, gradients = reference(wide, wide_batch)
        serial = errors_of(*reference(narrow, batch), loss, gradients)
        error = worst_error(planned(narrow, batch, "mb=1", device), batch, loss, gradients)
        yield name, {"plan": error, "module": serial}, too_large(error, 2 * serial + 1e-2)


def compiled(device: torch.device) -> Found:
    """Errors of compiled programs in float32, against the module in float64."""
    for name in ("GPT-2", "Llama", "convolutions"):
        model, batch = made(name, device, torch.float32)
        wide = copy.deepcopy(model).double()
        wide_batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        loss, gradients = reference(wide, wide_batch)
        parallel = planned(model, batch, "mb=1", device)
        parallel.compile_programs()
        error = worst_error(parallel, batch, loss, gradients)
        yield name, error, too_large(error, 1e-3)


def limit_of(name: str) -> float:
    """The largest error in float64."""
    return ROUTED if name == "Mixtral" else FLOAT64


def too_large(error: float, limit: float) -> str:
    """What is wrong with an error, or nothing."""
    return "" if error <= limit else f"{error:.1e}, at most {limit:.1e} was expected"


def strategies_of(name: str) -> tuple[str, ...]:
    """The strategies that the model can be trained by: batch norm needs whole batches.

    Where layers are recomputed, a batch norm is computed in parts, as if it were split.
    """
    return ("mb=1", "ac=full") if name == "convolutions" else STRATEGIES


def planned(
    model: nn.Module, batch: Batch, strategy: str, device: torch.device, **numerics: Any
) -> Any:
    """The parallel module of a copy of `model` under a strategy for one device."""
    graph = sw.capture(model, (), batch, **numerics)
    plan = sw.price(graph, f"1x{'H100' if device.type == 'cuda' else 'cpu'}", strategy, "sgd")
    return sw.parallelize(copy.deepcopy(model), plan, device=device)


def reference(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the module itself, run eagerly."""
    if isinstance(model, Loss) and next(model.parameters()).dtype is torch.float64:
        model = copy.deepcopy(model)
        model.eager_experts()
    model.zero_grad(set_to_none=True)
    loss = model(**batch)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst_error(
    parallel: Any, batch: Batch, loss: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> float:
    """The largest error of loss and gradients of one step, relative to the largest element."""
    parallel.zero_grad(set_to_none=True)
    got = parallel.forward_backward(batch)
    own = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}
    return errors_of(got, own, loss, gradients)


def errors_of(
    got: torch.Tensor,
    own: dict[str, torch.Tensor],
    loss: torch.Tensor,
    gradients: dict[str, torch.Tensor],
) -> float:
    """The largest error of loss and gradients, relative to the largest element of each tensor."""
    assert own.keys() == gradients.keys(), sorted(own.keys() ^ gradients.keys())
    worst = error_of(got, loss)
    # Of a bias that softmax cancels, the gradient is rounding alone.
    least = 1e-6 * max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        worst = max(worst, error_of(own[name], gradient, least))
    return worst


def error_of(got: torch.Tensor, wanted: torch.Tensor, least: float = 1e-30) -> float:
    """The largest error relative to the largest element, or to `least`; infinite for NaN."""
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    scale = max(wanted.abs().max().item(), least)
    error = float((whole.double() - wanted.double()).abs().max().item() / scale)
    return math.inf if math.isnan(error) else error  # `max` passes over NaN
