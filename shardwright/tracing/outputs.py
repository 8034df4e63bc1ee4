"""Flattens a module's result into tensors and a structure, and rebuilds it.

Containers, dataclasses and plain objects that hold tensors (e.g. a cache of keys and values) are
rebuilt as objects of their own classes; other values are those of the captured call.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.tracing.call import CaptureError
from shardwright.tracing.trees import Slot

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, type)


@dataclass(frozen=True, slots=True)
class _Instance:
    """An object as its class and its attributes; the items instead, where it is a mapping."""

    kind: type
    parts: dict[str, Any]


@dataclass(frozen=True)
class OutputTree:
    """The `structure` of a call's result around its tensors; `main` has the indices of outputs.

    For a module that returns its loss, `main` is the loss only.
    """

    structure: Any
    main: tuple[int, ...]

    def with_tensors(self, tensors: Sequence[Tensor], device: torch.device) -> Any:
        """The result with these tensors, on `device`."""
        return _joined(self.structure, tensors, device)


# Not a closure that calls itself: it would keep the tensors until garbage collection.
def _joined(structure: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """A structure with `tensors` in its slots."""

    def visit(part: Any) -> Any:
        return _joined(part, tensors, device)

    match structure:
        case Slot():
            return tensors[structure.number]
        case _Instance():
            parts = {key: visit(one) for key, one in structure.parts.items()}
            return _made(structure.kind, parts)
        case torch.device():
            return device
        case dict():
            return {key: visit(item) for key, item in structure.items()}
        case list():
            return list(map(visit, structure))
        case tuple() if hasattr(structure, "_fields"):
            return type(structure)(*map(visit, structure))
        case tuple():
            return tuple(map(visit, structure))
    return structure


def split_outputs(value: Any, main: Sequence[Tensor]) -> tuple[OutputTree, list[Tensor]]:
    """The structure and tensors of a result; raises `CaptureError` for what no plan can return."""
    tensors: list[Tensor] = []
    inside: list[int] = []  # containers that are being visited

    def visit(part: Any, path: str) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return Slot(len(tensors) - 1)
        if part is None or isinstance(part, _PLAIN):
            return part
        if id(part) in inside:
            raise CaptureError(f"the model's output {path} holds itself; return tensors")
        inside.append(id(part))
        try:
            return _visited(part, path, visit)
        finally:
            inside.pop()

    structure = visit(value, "")
    positions = tuple(next(i for i, t in enumerate(tensors) if t is one) for one in main)
    return OutputTree(structure, positions), tensors


def _visited(part: Any, path: str, visit: Any) -> Any:
    """A container of outputs, with what `visit` makes of each item; refuses unknown classes."""
    before = f"{path}." if path else ""

    def all_of(items: Mapping[str, Any]) -> dict[str, Any]:
        return {key: visit(item, f"{before}{key}") for key, item in items.items()}

    if type(part) is dict:
        return all_of(part)
    if isinstance(part, Mapping):
        return _Instance(type(part), all_of(part))
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        named: Any = part
        return type(part)(*all_of(named._asdict()).values())
    if type(part) in (tuple, list, torch.Size):
        return type(part)(all_of({str(i): item for i, item in enumerate(part)}).values())
    if is_dataclass(part) and not isinstance(part, type):
        return _Instance(type(part), all_of({f.name: getattr(part, f.name) for f in fields(part)}))
    known = not callable(part) and not isinstance(part, nn.Module)
    if known and hasattr(part, "__dict__") and type(part).__module__ != "builtins":
        return _Instance(type(part), all_of(vars(part)))
    raise CaptureError(
        f"the model's output {path or 'as a whole'} is a {type(part).__name__}, which a plan cannot"
        " return; return tensors, numbers, text, or containers and dataclasses of them"
    )


def _made(kind: type, parts: dict[str, Any]) -> Any:
    if issubclass(kind, Mapping):
        return kind(**parts)
    found = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(found, name, value)
    return found
