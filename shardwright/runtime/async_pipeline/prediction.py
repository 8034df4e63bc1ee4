"""Predicts weights a few updates ahead from optimizer state (SpecTrain).

Every optimizer here updates `W ← W − lr · d`; `Direction` is d, computed from the optimizer's
current state:

    SGD           v, the momentum buffer (SpecTrain, arXiv 1809.02839)
    Adam, AdamW   m̂ / (√v̂ + ε), plus weight decay where it is decoupled
                  (PipeOptim, arXiv 2312.00839)

`linear` applies it s times; `decayed` lets it decay as it would without further gradients:
lr · (γ + γ² + … + γˢ) · d (momentum decay, FTPipe). Optimizers are only read. With `maximize` their
state already has the opposite sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.runtime.parameters.dtensor_spec import local


class PredictionError(ValueError):
    """An optimizer whose next updates cannot be computed from its state."""


@dataclass(frozen=True, slots=True)
class Direction:
    """The next update of a parameter is about `-lr * step`; `momentum` is its decay per update."""

    step: torch.Tensor
    lr: float
    momentum: float


Predictor = Callable[[torch.Tensor, Direction, int], torch.Tensor]


@torch.no_grad()
def linear(weight: torch.Tensor, direction: Direction, updates: int) -> torch.Tensor:
    """`W − s·lr·d`.

    >>> linear(torch.ones(2), Direction(torch.tensor([1.0, 2.0]), lr=0.1, momentum=0.9), 3)
    tensor([0.7000, 0.4000])
    """
    return torch.add(weight, direction.step, alpha=-updates * direction.lr)


@torch.no_grad()
def decayed(weight: torch.Tensor, direction: Direction, updates: int) -> torch.Tensor:
    """`W − lr·(γ − γ^{s+1})/(1 − γ)·d`.

    >>> decayed(torch.ones(2), Direction(torch.tensor([1.0, 2.0]), lr=0.1, momentum=0.5), 2)
    tensor([0.9250, 0.8500])
    """
    faded = sum(direction.momentum**i for i in range(1, updates + 1))
    return torch.add(weight, direction.step, alpha=-faded * direction.lr)


PREDICTORS: Mapping[str, Predictor] = {"linear": linear, "decayed": decayed}


@torch.no_grad()
def sgd_direction(
    weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> Direction | None:
    """The momentum buffer; None before the first update."""
    buffer = state.get("momentum_buffer")
    if buffer is None:
        return None
    return Direction(buffer, float(group["lr"]), float(group["momentum"]))


@torch.no_grad()
def adam_direction(
    weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> Direction | None:
    """Bias-corrected `m̂/(√v̂ + ε)`, plus `λW` under AdamW; None before the first update."""
    if "exp_avg" not in state:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    count = float(state["step"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    root = (second / (1 - beta2**count)).sqrt_().add_(float(group["eps"]))
    step = (state["exp_avg"] / (1 - beta1**count)).div_(root)
    if group.get("decoupled_weight_decay") and group["weight_decay"]:
        step.add_(weight, alpha=float(group["weight_decay"]))
    return Direction(step, float(group["lr"]), beta1)


_DIRECTIONS: dict[type[torch.optim.Optimizer], Callable[..., Direction | None]] = {
    torch.optim.SGD: sgd_direction,
    torch.optim.Adam: adam_direction,
    torch.optim.AdamW: adam_direction,
}


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise `PredictionError` unless the state of `optimizer` permits a prediction."""
    if _reader(optimizer) is sgd_direction:
        for group in optimizer.param_groups:
            if not group["momentum"]:
                raise PredictionError(
                    "weights are predicted from momentum, and this SGD has momentum=0; give it"
                    " momentum, or train with weights='stash' or 'stale'"
                )


def direction_of(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: Mapping[str, Any]
) -> Direction | None:
    """The next direction of a parameter of a `group` of `optimizer`, or None if unknown.

    For a DTensor it is that of this rank's tile.
    """
    state = optimizer.state.get(parameter, {})
    tiles = {k: local(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return _reader(optimizer)(local(parameter).detach(), tiles, group)


def predict(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    updates: int,
    predictor: Predictor,
) -> list[torch.Tensor]:
    """The predicted parameters after `updates` more updates; for DTensors, this rank's tiles.

    A parameter that has not been updated yet, or that the optimizer does not train, is returned
    unchanged and shares its memory.
    """
    if updates == 0:
        return [local(parameter).detach() for parameter in parameters]
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    found = []
    for parameter in parameters:
        group = groups.get(parameter)
        direction = None if group is None else direction_of(optimizer, parameter, group)
        weight = local(parameter).detach()
        found.append(weight if direction is None else predictor(weight, direction, updates))
    return found


def _reader(optimizer: torch.optim.Optimizer) -> Callable[..., Direction | None]:
    for kind, read in _DIRECTIONS.items():
        if isinstance(optimizer, kind):
            return read
    known = ", ".join(kind.__name__ for kind in _DIRECTIONS)
    raise PredictionError(
        f"weights cannot be predicted from the state of {type(optimizer).__name__}; use one of"
        f" {known}, or train with weights='stash' or 'stale'"
    )
