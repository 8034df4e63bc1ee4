"""Functions that give the tensors of a module on the meta device their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from shardwright.ir.plan import PlanError

Init = Callable[[nn.Module], object] | str | None
_RESET = "reset_parameters"


def initializer(model: nn.Module, init: Init) -> Callable[[nn.Module], object] | None:
    """The function that `init` says; None if nothing does and the module has none of its own."""
    if callable(init):
        return init
    if init == _RESET:
        return reset_parameters
    if init is not None:
        raise PlanError(f"init is {init!r}; give a function of the module, or {_RESET!r}")
    own = getattr(model, "init_weights", None)
    if callable(own) and _takes_nothing(own):
        return lambda model: own()
    return None


def reset_parameters(model: nn.Module) -> None:
    """Call the method `reset_parameters` of every module that has one, children first."""
    done: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in done:
            return
        done.add(id(module))
        for child in module.children():
            visit(child)
        # torch's attention has that method under a private name.
        name = "_reset_parameters" if isinstance(module, nn.MultiheadAttention) else _RESET
        reset = getattr(module, name, None)
        if callable(reset) and _takes_nothing(reset):
            reset()

    visit(model)


def _takes_nothing(function: Callable[..., object]) -> bool:
    """Whether it can be called without arguments."""
    parameters = inspect.signature(function).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in optional for p in parameters)
