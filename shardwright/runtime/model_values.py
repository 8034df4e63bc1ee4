"""The values of a model that is given without them: as a function, or on the meta device."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shardwright.ir.plan import PlanError
from shardwright.runtime.comm.equal_ranks import all_equal
from shardwright.runtime.deferred.initializers import Init, initializer
from shardwright.runtime.deferred.sources import (
    TensorSources,
    all_tensors,
    deferred,
    initialized,
    sources_of,
)
from shardwright.runtime.weight_files.stored_weights import StoredSources, StoredWeights
from shardwright.tracing.arguments import require_module

Stored = str | os.PathLike[str] | StoredWeights | None


def with_values(
    model: nn.Module | Callable[[], nn.Module], init: Init = None, weights: Stored = None
) -> tuple[nn.Module, TensorSources | None]:
    """The module to run, and the source of the values that it has not.

    Raises `PlanError` that names a tensor without values, or where ranks would have other values,
    and `CheckpointError` for files of another model.
    """
    if not isinstance(model, nn.Module) and callable(model):
        if init is not None:
            raise PlanError("init is for modules on the meta device; leave it out for a function")
        model = deferred(model)
    require_module(model)
    assert isinstance(model, nn.Module)
    sources = sources_of(model)
    if sources is None:
        if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            if init is not None or weights is not None:
                name = "weights" if init is None else "init"
                raise PlanError(f"{name} is for modules on the meta device; this one has values")
            return model, None
        if (function := initializer(model, init)) is not None:
            sources = initialized(model, function)
    if weights is not None:
        stored = weights if isinstance(weights, StoredWeights) else StoredWeights(weights)
        sources = StoredSources(model, stored, sources)
    if sources is None:
        raise PlanError(_without(model))
    sources.check(model)
    _agree(sources.digest(all_tensors(model)))
    return model, sources


def _without(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has parameters on the meta device, without values; give"
        " parallelize the function that builds it, as in sw.parallelize(lambda: Model(), plan),"
        " which has the values that one device would have; or weights=path; or"
        " init='reset_parameters', which calls that method of every module, or init=function"
    )


def _agree(digest: int) -> None:
    """Raise `PlanError`, on all ranks, unless all would compute the same values."""
    if not dist.is_initialized() or all_equal(digest, (dist.group.WORLD,)):
        return
    every = [0] * dist.get_world_size()
    dist.all_gather_object(every, digest)
    other = next((rank for rank, found in enumerate(every) if found != every[0]), None)
    if other is not None:
        raise PlanError(
            f"rank {other} would give the model other values than rank 0; call torch.manual_seed"
            " with the same seed on all ranks before parallelize, and build the same model"
        )
