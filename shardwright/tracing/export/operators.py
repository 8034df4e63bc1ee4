"""Calls the operators of a graph: resolves their names and arguments to torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwright.ir.graph import Arg, Op, Ref, Symbol
from shardwright.tracing.decompose import causal_rows as causal_rows
from shardwright.tracing.decompose import experts as experts
from shardwright.tracing.decompose import local_batchnorm as local_batchnorm
from shardwright.tracing.export import kernels as kernels  # registers our own operators
from shardwright.tracing.export import lookup as lookup

OVERLOAD: type[Any] = type(torch.ops.aten.mm.default)  # torch has no public name for this class


FUNCTION = "shardwright.function.default"  # args: operands, key of the call, class and arguments
_PYTHON: dict[str, Callable[..., Any]] = {}  # operators that are run by Python functions


def python_operator(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what runs the operator `target` wherever it is called by its name."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        _PYTHON[target] = run
        return run

    return register


def operator_of(target: str) -> Callable[..., Any]:
    """The torch operator `namespace.name.overload`.

    >>> operator_of("aten.mm.default")
    <OpOverload(op='aten.mm', overload='default')>
    """
    if target in _PYTHON:
        return _PYTHON[target]
    namespace, name, overload = target.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def to_torch(arg: Arg, values: Mapping[str, Any], device: torch.device) -> Any:
    """An argument as torch takes it: values by name, symbols by their torch objects."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, Symbol):
        return device if arg.kind == "device" else getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [to_torch(a, values, device) for a in arg]
    return arg


def argument(op: Op, index: int, name: str, default: Arg = None) -> Arg:
    """Positional argument `index`, or keyword `name`, or the default."""
    return op.args[index] if index < len(op.args) else dict(op.kwargs).get(name, default)


def with_argument(op: Op, index: int, name: str, value: Arg) -> Op:
    """The call with another value for the argument at `index`, or else for the keyword `name`."""
    if index < len(op.args):
        return replace(op, args=(*op.args[:index], value, *op.args[index + 1 :]))
    kwargs = tuple(pair for pair in op.kwargs if pair[0] != name)
    return replace(op, kwargs=(*kwargs, (name, value)))


def call_op(op: Op, values: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Results of one call on the given values."""
    args = [to_torch(a, values, device) for a in op.args]
    kwargs = {key: to_torch(value, values, device) for key, value in op.kwargs}
    returned = operator_of(op.target)(*args, **kwargs)
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)
