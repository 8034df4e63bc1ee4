"""Calls the operators of a graph: resolves their names and arguments to those of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.ir.graph import Arg, Op, Ref, Symbol
from shardwright.tracing.decompose.tables import local_batchnorm as local_batchnorm
from shardwright.tracing.export import kernels as kernels  # registers our own operators
from shardwright.tracing.gradients import parameter_updates as parameter_updates
from shardwright.tracing.own_operators import causal_rows as causal_rows
from shardwright.tracing.own_operators import chunked_mlp as chunked_mlp
from shardwright.tracing.own_operators import cross_entropy as cross_entropy
from shardwright.tracing.own_operators import experts as experts
from shardwright.tracing.own_operators import linear_cross_entropy as linear_cross_entropy
from shardwright.tracing.own_operators import lookup as lookup
from shardwright.tracing.own_operators.registered import registered
from shardwright.tracing.values import selection as selection

OVERLOAD: type[Any] = type(torch.ops.aten.mm.default)  # torch has no public name for this class
FACTORIES = frozenset(  # functions that return a tensor of its own memory, without others' values
    f"{prefix}{name}{suffix}"
    for name in ("empty", "zeros", "ones", "full")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
)
MAKING = FACTORIES.union(  # functions whose results share memory with no other tensor
    ("add", "sub", "mul", "div", "pow", "exp", "sqrt", "rsqrt", "sigmoid", "softmax"),
    ("log_softmax", "sum", "mean", "cumsum", "topk", "gather", "linear", "matmul", "mm", "bmm"),
    ("eq", "ne", "lt", "le", "gt", "ge"),
)


_PYTHON: dict[str, Callable[..., Any]] = {}  # operators that are run by Python functions


def python_operator(target: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: registers the function that runs the operator `target` by its name."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        _PYTHON[target] = run
        return run

    return register


def operator_of(target: str) -> Callable[..., Any]:
    """The torch operator `namespace.name.overload`, or the function of that name.

    >>> operator_of("aten.mm.default")
    <OpOverload(op='aten.mm', overload='default')>
    """
    if target in _PYTHON:
        return _PYTHON[target]
    return registered(target)


def to_torch(arg: Arg, values: Mapping[str, Any], device: torch.device) -> Any:
    """An argument in the form that torch takes: values by name, symbols as their torch objects."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, Symbol):
        return device if arg.kind == "device" else getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [to_torch(a, values, device) for a in arg]
    return arg


def call_op(op: Op, values: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Results of one call of `op` on the given values."""
    args = [to_torch(a, values, device) for a in op.args]
    kwargs = {key: to_torch(value, values, device) for key, value in op.kwargs}
    returned = operator_of(op.target)(*args, **kwargs)
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)
