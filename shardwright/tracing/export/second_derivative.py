"""Errors of autograd functions whose backward pass cannot be differentiated itself."""

from __future__ import annotations

import torch


def refuse_second_derivative(what: str, instead: str) -> None:
    """Raise `RuntimeError` if the backward pass of `what` that runs now would be differentiated.

    Autograd enables gradients in a backward pass for `create_graph=True` only, and a compiler
    differentiates its graph once. `instead` names an alternative that has a second derivative.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} has no second derivative, which create_graph=True asks for: leave that out, or"
            f" {instead}"
        )
