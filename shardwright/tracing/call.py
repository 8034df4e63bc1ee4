"""Flattens one call of a model: paths of its tensor arguments and of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from shardwright.ir.graph import TensorValue
from shardwright.ir.plan import InputSpec

# Before the path of an input whose values a capture needs: one of ones where it holds numbers.
EXAMPLE = "example of "


class CaptureError(ValueError):
    """A model or an example call that cannot be captured as a graph.

    `module` is the path of the sub-module in which it failed; empty for the model itself.
    `refused` says that opaque modules would not help, `by_value` that a size or a decision depends
    on values, which a trace does not have.
    """

    def __init__(
        self, message: str, module: str = "", *, refused: bool = False, by_value: bool = False
    ) -> None:
        super().__init__(message)
        self.module = module
        self.refused = refused
        self.by_value = by_value


def flatten(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf of a call by its path.

    >>> flatten((1,), {"pair": (2, 3)})
    {'args.0': 1, 'kwargs.pair.0': 2, 'kwargs.pair.1': 3}
    """
    leaves = dict(_leaves("args", tuple(args)))
    leaves.update(_leaves("kwargs", dict(kwargs)))
    return leaves


def unflatten(leaves: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `flatten`; containers become tuples and dicts, tensor constants tensors."""
    tree: dict[str, Any] = {"args": {}, "kwargs": {}}
    for path, leaf in leaves.items():
        if path.startswith(EXAMPLE):
            continue
        value = tensor_of(leaf) if isinstance(leaf, TensorValue) else leaf
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    args = tuple(_sequences(tree["args"][str(i)]) for i in range(len(tree["args"])))
    return args, {key: _sequences(value) for key, value in tree["kwargs"].items()}


def tensor_of(value: TensorValue) -> torch.Tensor:
    """The tensor that a constant of a graph describes, on the CPU."""
    dtype = getattr(torch, value.dtype)
    return torch.tensor(value.elements, dtype=dtype, device="cpu").view(value.shape)


def value_of(tensor: torch.Tensor) -> TensorValue:
    """A tensor of integers or truth values as a constant of a graph."""
    elements = tuple(map(int, tensor.detach().reshape(-1).tolist()))
    return TensorValue(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), elements)


def split_call(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and plain constants of a call, by path; raises `CaptureError` for anything else."""
    tensors, constants = {}, {}
    for path in _empty("args", tuple(args)), *(_empty(f"kwargs.{k}", v) for k, v in kwargs.items()):
        if path:
            raise CaptureError(
                f"argument {path} is empty, and a plan keeps leaves of containers only; leave it"
                " out, or pass None where the model takes that"
            )
    for path, value in flatten(args, kwargs).items():
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        elif value is None or isinstance(value, bool | int | float | str):
            constants[path] = value
        else:
            raise CaptureError(
                f"argument {path} is a {type(value).__name__}; the example call may hold tensors,"
                " None, bool, int, float, str, and tuples, lists and dicts of them"
            )
    return tensors, constants


def example_call(
    inputs: Sequence[InputSpec], constants: Sequence[tuple[str, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with these shapes, for capturing a planned graph again.

    Its tensors are on the meta device, but for those of which `constants` have an example.
    """
    leaves: dict[str, Any] = dict(constants)
    for spec in inputs:
        like = torch.empty(
            spec.shape,
            dtype=getattr(torch, spec.dtype),
            device="meta",
            requires_grad=spec.requires_grad,
        )
        leaves[spec.key] = _example(like, leaves.get(EXAMPLE + spec.key))
    return unflatten(leaves)


def _example(like: torch.Tensor, value: Any) -> torch.Tensor:
    """`like` with the values of an example; on the meta device where there is none."""
    if isinstance(value, TensorValue):
        known = tensor_of(value)
        return known if known.shape == like.shape and known.dtype == like.dtype else like
    return like if value is None else torch.full_like(like, value, device="cpu")


def as_planned(
    inputs: Sequence[InputSpec], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call, with tensors that require gradients where those of the planned call did."""
    leaves = flatten(args, kwargs)
    other = {
        spec.key: tensor.detach().requires_grad_(spec.requires_grad)
        for spec in inputs
        if isinstance(tensor := leaves.get(spec.key), torch.Tensor)
        and tensor.is_floating_point()
        and tensor.requires_grad is not spec.requires_grad
    }
    return unflatten({**leaves, **other}) if other else (tuple(args), dict(kwargs))


def select_outputs(returned: Any) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    """Names and tensors of the outputs that a training step needs.

    The loss if there is one: the tensor `loss` of a mapping or dataclass, or a scalar that is the
    first item of a tuple or list. Otherwise all tensors, so that the loss can be computed outside.
    Raises `CaptureError` for a result without tensors, and for any other type.
    """
    if isinstance(returned, torch.Tensor):
        return ("",), [returned]
    if is_dataclass(returned) and not isinstance(returned, Mapping | type):
        returned = {field.name: getattr(returned, field.name) for field in fields(returned)}
    if isinstance(returned, Mapping):
        if isinstance(returned.get("loss"), torch.Tensor):
            return ("",), [returned["loss"]]
        named = dict(returned)
    elif isinstance(returned, tuple | list):
        if returned and isinstance(returned[0], torch.Tensor) and returned[0].dim() == 0:
            return ("",), [returned[0]]
        named = {str(i): value for i, value in enumerate(returned)}
    else:
        raise CaptureError(
            f"the model returned a {type(returned).__name__}; return a tensor, a tuple of tensors"
            " or a dict of tensors (with the loss as 'loss')"
        )
    tensors = {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise CaptureError("the model returned no tensor; return the loss, or what it is made of")
    return tuple(tensors), list(tensors.values())


def rebuild_outputs(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
    """The outputs of a parallel module: a tensor, tuple or dict, by names of `select_outputs`."""
    if tuple(keys) == ("",):
        return tensors[0]
    if all(key.isdigit() for key in keys):
        return tuple(tensors)
    return dict(zip(keys, tensors, strict=True))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or "." in key:
                raise CaptureError(f"{path} has the key {key!r}; keys must be text without dots")
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}.{i}", item)
    else:
        yield path, value


def _empty(path: str, value: Any) -> str:
    """The path of the first empty container; empty if there is none."""
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, tuple | list):
        items = list(enumerate(value))
    else:
        return ""
    if not items:
        return "" if path == "args" else path
    return next((found for key, item in items if (found := _empty(f"{path}.{key}", item))), "")


def _sequences(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    items = {key: _sequences(value) for key, value in node.items()}
    if items and all(key.isdigit() for key in items):
        return tuple(items[str(i)] for i in range(len(items)))
    return items
