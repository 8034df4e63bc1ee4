"""Binds arguments of the planned call, and of later calls, to the module's signature.

A captured graph depends on the shapes and dtypes of its tensor arguments, and on the values of all
other arguments. A call that differs in one of them would have another graph, so it raises an error
that names the argument. Positional and keyword arguments are equivalent.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.ir.graph import Graph, LeafKind
from shardwright.tracing.call import CaptureError, unflatten

_ANY = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)
_EVERY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class BatchError(ValueError):
    """Raised for a call whose arguments differ from those that the module was captured with."""


def signature_of(model: nn.Module) -> inspect.Signature:
    """The signature of `model.forward`; one that accepts any arguments if Python knows none."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return _ANY


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor argument: its path in the captured call, its shape and dtype.

    If it is `differentiable` the graph has its gradient.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass
class CallForm:
    """The arguments that `graph` was captured with, to which those of later calls are compared.

    Without a `signature`, later calls may leave out arguments other than tensors. `shapes` are
    those of the tensor arguments, by their paths in the captured call.
    """

    graph: Graph
    signature: inspect.Signature | None = None
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    names: dict[str, str] = field(init=False)  # their names in the signature
    _planned: dict[str, Any] = field(init=False)  # value of each argument that was given
    _signature: inspect.Signature = field(init=False)
    # The arguments by name, where each is a tensor: a call that gives all by name is checked fast.
    _tensors: dict[str, _Planned] = field(init=False)

    def __post_init__(self) -> None:
        leaves: dict[str, Any] = dict(self.graph.constants)
        for leaf in self.graph.leaves_of(LeafKind.INPUT):
            tensor = self.graph.tensor[leaf.name]
            dtype, wanted = getattr(torch, tensor.dtype), tensor.requires_grad
            leaves[leaf.keys[0]] = _Planned(leaf.keys[0], tensor.shape, dtype, wanted)
        planned = (value for value in leaves.values() if isinstance(value, _Planned))
        self.shapes = {one.key: one.shape for one in planned}
        self._signature = self.signature or _ANY
        args, kwargs = unflatten(leaves)
        try:
            self._planned = _given(self._signature, args, kwargs)
        except TypeError:  # a wrapped forward whose signature is hidden
            self._signature = _ANY
            self._planned = _given(_ANY, args, kwargs)
        every = (pair for name, value in self._planned.items() for pair in _leaves(name, value))
        self.names = {one.key: path for path, one in every if isinstance(one, _Planned)}
        plain = all(isinstance(one, _Planned) for one in self._planned.values())
        self._tensors = dict(self._planned) if plain else {}

    def inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """The tensors of a call by their paths in the captured call; shapes are not checked.

        Raises `BatchError` for an argument that differs in anything but the values and shapes of
        tensors, or that is on another device than `device` and the CPU.
        """
        if not args and self._tensors and kwargs.keys() == self._tensors.keys():
            return {
                one.key: _tensor(name, kwargs[name], one, device)
                for name, one in self._tensors.items()
            }
        try:
            given = _given(self._signature, args, kwargs)
        except TypeError as e:
            raise BatchError(f"the call does not fit the module: {e}") from e
        found: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys((*self._planned, *given)):
            if self.signature is None and name not in given and not self._has_tensor(name):
                continue
            planned = dict(_leaves(name, self._planned.get(name, self._default(name))))
            now = dict(_leaves(name, given.get(name, self._default(name))))
            for path in dict.fromkeys((*now, *planned)):
                there, here = planned.get(path, _NOTHING), now.get(path, _NOTHING)
                if isinstance(there, _Planned):
                    found[there.key] = _tensor(path, here, there, device)
                elif not _equal(there, here):
                    raise BatchError(_difference(path, here, there))
        return found

    def mapped(
        self, args: Any, kwargs: Mapping[str, Any], part: Callable[[str, torch.Tensor], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with each tensor replaced by `part(key, tensor)`."""

        def changed(call: Any, change: Callable[[torch.Tensor], Any]) -> Any:
            if isinstance(call, torch.Tensor):
                return change(call)
            if isinstance(call, Mapping):
                return {key: changed(item, change) for key, item in call.items()}
            return (
                tuple(changed(c, change) for c in call) if isinstance(call, tuple | list) else call
            )

        # One object per argument: the same tensor may be passed twice, and cut in two ways.
        distinct = changed((tuple(args), dict(kwargs)), lambda tensor: tensor.view_as(tensor))
        of = {id(tensor): key for key, tensor in self.inputs(*distinct).items()}

        def cut(tensor: torch.Tensor) -> Any:  # a tensor that is a constant of the plan stays
            return part(of[id(tensor)], tensor) if id(tensor) in of else tensor

        found: tuple[tuple[Any, ...], dict[str, Any]] = changed(distinct, cut)
        return found

    def _default(self, name: str) -> Any:
        known = self._signature.parameters.get(name)
        if known is None or known.kind in _EVERY or known.default is inspect.Parameter.empty:
            return _NOTHING
        return known.default

    def _has_tensor(self, name: str) -> bool:
        planned = _leaves(name, self._planned.get(name, ()))
        return any(isinstance(value, _Planned) for _, value in planned)


def require_module(model: object) -> None:
    """Raise `CaptureError` unless `model` is a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise CaptureError(f"model is the class {name}; give a module of it, as {name}()")
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", type(model).__name__)
        raise CaptureError(
            f"model is {name}, which is no torch.nn.Module; write it as the forward of one,"
            " which holds the parameters that are to be trained"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise CaptureError(
            f"model is wrapped: {type(model).__name__} already shares out its batch; give what it"
            " wraps, its .module"
        )


def require_call(args: object, kwargs: object) -> None:
    """Raise `CaptureError` unless these are arguments of a call: a tuple or list, and a mapping."""
    if not isinstance(args, tuple | list):
        raise CaptureError(
            f"args is a {type(args).__name__}; give the positional arguments of the model as a"
            " tuple, as in args=(x,)"
        )
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    ):
        raise CaptureError(
            f"kwargs is a {type(kwargs).__name__}; give the keyword arguments of the model by name,"
            ' as in kwargs={"x": x}'
        )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all distinct parameters: a lower bound of the memory of all ranks together."""
    found = (p for p in model.parameters() if not nn.parameter.is_lazy(p))
    return sum(p.numel() * p.element_size() for p in found)


def check_loss(loss: str) -> None:
    """Raise `CaptureError` unless `loss` is "model" or "outside"."""
    if loss not in ("model", "outside"):
        raise CaptureError(
            f"loss is {loss!r}; choose 'model' or 'outside', for a loss that is computed of what"
            " the model returns"
        )


def require_loss(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[str]
) -> None:
    """Raise `CaptureError` where a model takes labels, got none and returned several outputs."""
    signature = signature_of(model)
    if tuple(outputs) == ("",) or "labels" not in signature.parameters:
        return
    if _given(signature, args, kwargs).get("labels") is None:
        raise CaptureError(
            f"{type(model).__name__} returns no loss, as it is called without labels: add labels to"
            " the example batch, or say loss='outside' if the loss is computed of what it returns"
        )


class _Nothing:
    """Marks a missing argument."""


_NOTHING = _Nothing()


def _given(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The passed arguments by parameter name; raises `TypeError`."""
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found.update((f"{name}.{i}", item) for i, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of an argument by their paths; an empty container is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, tuple | list) and value:
        for i, item in enumerate(value):
            yield from _leaves(f"{path}.{i}", item)
    else:
        yield path, value


def _tensor(path: str, given: Any, planned: _Planned, device: torch.device | None) -> torch.Tensor:
    if not isinstance(given, torch.Tensor) or given.dtype != planned.dtype:
        raise _no_such_tensor(path, given, planned)
    if given.requires_grad and torch.is_grad_enabled() and not planned.differentiable:
        raise BatchError(
            f"the argument {path} requires a gradient, and the plan was made with one that does"
            f" not: detach it, or capture and plan with {path}.requires_grad_()"
        )
    if device is not None and given.device.type != "cpu" and _elsewhere(given.device, device):
        raise BatchError(
            f"the argument {path} is on {given.device}, and the module on {device}: move it there"
        )
    return given


def _no_such_tensor(path: str, given: Any, planned: _Planned) -> BatchError:
    wanted = f"the plan is for {_described(planned.dtype, planned.shape)}"
    if isinstance(given, torch.Tensor):
        how = f"pass it as {path}.to({planned.dtype}), or capture and plan with {given.dtype}"
    else:
        how = "pass torch.as_tensor of it" if hasattr(given, "__array__") else "pass a tensor"
    return BatchError(f"the argument {path} is {_described_value(given)}, and {wanted}: {how}")


def _difference(path: str, given: Any, planned: Any) -> str:
    """A sentence on an argument that differs from the planned one, and what to do."""
    if planned is _NOTHING:
        return (
            f"the argument {path} is {_described_value(given)}, and the plan was made without it:"
            " leave it out, or capture and plan with it"
        )
    if isinstance(planned, torch.Tensor) and isinstance(given, torch.Tensor):
        return (
            f"the argument {path} is {_described_value(given)} with other values than the"
            f" {_described_value(planned)} that the plan was made with, and sizes of the captured"
            " graph depend on its values: pass the same, or capture and plan with the other values"
        )
    return (
        f"the argument {path} is {_described_value(given)}, and the plan was made with"
        f" {_described_value(planned)}, which is part of the captured graph: pass that, or capture"
        " and plan with the other value"
    )


def _elsewhere(one: torch.device, other: torch.device) -> bool:
    if one.type != other.type:
        return True
    return None not in (one.index, other.index) and one.index != other.index


def _equal(one: Any, other: Any) -> bool:
    """Whether two values other than tensors give the same graph."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return not one and not other
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    for kind in (bool, int, str):
        if isinstance(one, kind) or isinstance(other, kind):
            return isinstance(one, kind) and isinstance(other, kind) and bool(one == other)
    return False


def _described_value(value: Any) -> str:
    if value is _NOTHING:
        return "not given"
    if isinstance(value, torch.Tensor):
        return _described(value.dtype, tuple(value.shape))
    if isinstance(value, _Planned):
        return _described(value.dtype, value.shape)
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return f"a {type(value).__module__} array of {value.dtype}"
    return repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"


def _described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
