"""Captures a model as it computes in 16 bits although its parameters are float32.

While the model is traced, narrow copies replace its parameters. Batch norms keep
their parameters in float32, as torch's kernels need them in the dtype of the running
statistics. Buffers are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.ir.options.mixed_precision import compute_dtype
from shardwright.ir.options.numerics import Numerics
from shardwright.tracing.call import CaptureError

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextmanager
def computation_dtype(model: nn.Module, numerics: Numerics) -> Iterator[None]:
    """A context in which the parameters of `model` have the dtype in which operators compute.

    In mixed precision, uninitialised parameters of 16 bits replace those outside of batch norms.
    Raises `CaptureError` for a floating-point parameter that is not float32, float16 or bfloat16,
    and for TF32 in a model without a parameter in float32.
    """
    compute = compute_dtype(numerics)
    if compute is None:
        _require_float32(model, numerics)
        yield
        return
    owned = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_floating_point()
    ]
    kept = {id(p) for module, _, p in owned if isinstance(module, _NORMS)}
    made: dict[int, nn.Parameter] = {}
    for module, name, parameter in owned:
        if parameter.dtype not in _TAKEN:
            raise CaptureError(
                f"precision={numerics.precision!r} keeps parameters in float32, and {name} of"
                f" {type(module).__name__} is {parameter.dtype}; give the model in float32"
            )
        if id(parameter) not in kept and id(parameter) not in made:
            narrow = torch.empty_like(parameter, dtype=getattr(torch, compute), requires_grad=False)
            made[id(parameter)] = nn.Parameter(narrow, requires_grad=parameter.requires_grad)
    for module, name, parameter in owned:
        setattr(module, name, made.get(id(parameter), parameter))
    try:
        yield
    finally:
        for module, name, parameter in owned:
            setattr(module, name, parameter)


def _require_float32(model: nn.Module, numerics: Numerics) -> None:
    """Raise `CaptureError` for products in TF32 of a model that has none in float32."""
    dtypes = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if numerics.precision == "tf32" and dtypes and torch.float32 not in dtypes:
        raise CaptureError(
            "precision='tf32' is for products in float32, and parameters are"
            f" {min(map(str, dtypes))}; give the model in float32, or leave precision out"
        )


def cast_input(tensor: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """`tensor`, cast to the dtype of mixed precision if it is floating point."""
    compute = compute_dtype(numerics)
    if compute is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(getattr(torch, compute))
