"""The values of a model that is given without them: as a function, or on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shardwright.ir.plan import PlanError
from shardwright.runtime.deferred.sources import (
    TensorSources,
    deferred,
    initialized,
    sources_of,
)
from shardwright.tracing.arguments import require_module

Init = Callable[[nn.Module], object] | str | None
_RESET = "reset_parameters"


def with_values(
    model: nn.Module | Callable[[], nn.Module], init: Init = None
) -> tuple[nn.Module, TensorSources | None]:
    """The module to run, and the source of the values that it has not.

    Raises `PlanError` that names a tensor without values, or where ranks would draw other numbers.
    """
    if not isinstance(model, nn.Module) and callable(model):
        if init is not None:
            raise PlanError("init is for modules on the meta device; leave it out for a function")
        model = deferred(model)
    require_module(model)
    assert isinstance(model, nn.Module)
    sources = sources_of(model)
    if sources is None:
        tensors = [*model.parameters(), *model.buffers()]
        if not any(t.is_meta for t in tensors):
            if init is not None:
                raise PlanError("init is for modules on the meta device; this one has values")
            return model, None
        sources = initialized(model, initializer(model, init))
    sources.check(model)
    _agree(sources)
    return model, sources


def initializer(model: nn.Module, init: Init) -> Callable[[nn.Module], object]:
    """The function that gives a module on the meta device its values."""
    if callable(init):
        return init
    if init == _RESET:
        return reset_parameters
    if init is not None:
        raise PlanError(f"init is {init!r}; give a function of the module, or {_RESET!r}")
    own = getattr(model, "init_weights", None)
    if callable(own) and _takes_nothing(own):
        return lambda model: own()
    raise PlanError(
        f"{type(model).__name__} has parameters on the meta device, without values; give"
        " parallelize the function that builds it, as in sw.parallelize(lambda: Model(), plan),"
        f" which has the values that one device would have; or init={_RESET!r}, which calls that"
        " method of every module, or init=function"
    )


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


def _agree(sources: TensorSources) -> None:
    """Raise `PlanError`, on all ranks, unless all would compute the same values."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, sources.digest())
    other = next((rank for rank, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        raise PlanError(
            f"rank {other} would give the model other values than rank 0; call torch.manual_seed"
            " with the same seed on all ranks before parallelize, and build the same model"
        )
