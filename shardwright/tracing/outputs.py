"""Flattens what a module returned into tensors and a structure, and rebuilds it.

Containers, dataclasses and plain objects that hold tensors (a cache of keys and values, say) come
back as objects of their own classes; what is no tensor comes back as it was when the module was
captured.
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
    """An object in parts: its class, and its attributes, or its items where it is a mapping."""

    kind: type
    parts: dict[str, Any]


@dataclass(frozen=True)
class Returned:
    """What is `around` the tensors of a call's result; `main` are those that the loss is among.

    Of a module that returns its loss `main` is that alone.
    """

    around: Any
    main: tuple[int, ...]

    def with_tensors(self, tensors: Sequence[Tensor], device: torch.device) -> Any:
        """The result, with these tensors, on `device`."""

        def walk(part: Any) -> Any:
            match part:
                case Slot():
                    return tensors[part.number]
                case _Instance():
                    return _made(part.kind, {key: walk(one) for key, one in part.parts.items()})
                case torch.device():
                    return device
                case dict():
                    return {key: walk(item) for key, item in part.items()}
                case list():
                    return list(map(walk, part))
                case tuple() if hasattr(part, "_fields"):
                    return type(part)(*map(walk, part))
                case tuple():
                    return tuple(map(walk, part))
            return part

        return walk(self.around)


def take_outputs(value: Any, main: Sequence[Tensor]) -> tuple[Returned, list[Tensor]]:
    """A result in two parts; raises `CaptureError` for what no plan can return."""
    tensors: list[Tensor] = []
    inside: list[int] = []  # what is being walked

    def walk(part: Any, path: str) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
            return Slot(len(tensors) - 1)
        if part is None or isinstance(part, _PLAIN):
            return part
        if id(part) in inside:
            raise CaptureError(f"the model's output {path} holds itself; return tensors")
        inside.append(id(part))
        try:
            return _walked(part, path, walk)
        finally:
            inside.pop()

    around = walk(value, "")
    places = tuple(next(i for i, t in enumerate(tensors) if t is one) for one in main)
    return Returned(around, places), tensors


def _walked(part: Any, path: str, walk: Any) -> Any:
    before = f"{path}." if path else ""

    def all_of(items: Mapping[str, Any]) -> dict[str, Any]:
        return {key: walk(item, f"{before}{key}") for key, item in items.items()}

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
