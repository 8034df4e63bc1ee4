"""Flattens arguments and results of a module into tensors and a structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder for the tensor of this number."""

    number: int


def split_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """`value` with slots in place of its tensors, and the tensors.

    >>> split_tensors({"a": (torch.zeros(1), 2)})
    ({'a': (Slot(number=0), 2)}, [tensor([0.])])
    """
    tensors: list[torch.Tensor] = []

    def visit(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return Slot(len(tensors) - 1)
        return _rebuilt(part, visit)

    return visit(value), tensors


def join_tensors(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `split_tensors`, with the given tensors."""

    def visit(part: Any) -> Any:
        return tensors[part.number] if isinstance(part, Slot) else _rebuilt(part, visit)

    return visit(structure)


def _rebuilt(part: Any, visit: Any) -> Any:
    """A container with its items visited; other values unchanged."""
    if isinstance(part, Mapping):
        items = {key: visit(item) for key, item in part.items()}
        return items if type(part) is dict else type(part)(**items)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*map(visit, part))
    if isinstance(part, tuple | list):
        return type(part)(visit(item) for item in part)
    return part
