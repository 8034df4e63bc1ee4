"""Recorded operator calls: values for `replay.py`, which refer to tensors by storage and view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from shardwright.runtime.parameters.storage_view import StorageView

# Operators that write all elements of their first argument and read none of them.
OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"})
OVERWRITING |= {"cauchy_", "exponential_", "geometric_", "log_normal_"}
EMPTY = frozenset(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"]
)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor without memory: a view of the storage of that number, which has `nbytes` bytes."""

    storage: int
    nbytes: int
    view: StorageView

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.size)

    @property
    def span(self) -> tuple[int, int] | None:
        """The elements (start, stop) of the storage in order; None if they are not contiguous."""
        view, expected = self.view, 1
        if view.conjugated or view.negated:
            return None
        for size, stride in zip(reversed(view.size), reversed(view.stride), strict=True):
            if size != 1 and stride != expected:
                return None
            expected *= size
        return view.offset, view.offset + prod(view.size)

    @property
    def is_whole(self) -> bool:
        """Whether it has every element of its storage, each once."""
        view, expected = self.view, 1
        for stride, size in sorted(zip(view.stride, view.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * view.dtype.itemsize == self.nbytes


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor with memory, as it was when the call was recorded."""

    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """A call of an operator whose arguments hold `TensorRef` and `Constant` in place of tensors.

    Attributes:
        number: its position among all steps.
        func: the operator.
        args, kwargs: its arguments, on the CPU.
        made: its results with storages of their own, by position in the flat result.
        draws: whether it draws random numbers.
        before: what the generator's state was; see `random_states.py`.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: dict[int, TensorRef] = field(default_factory=dict)
    draws: bool = False
    before: Any = None

    @property
    def name(self) -> str:
        return operator_name(self.func)

    @cached_property
    def written(self) -> list[TensorRef]:
        """The arguments that it changes."""
        return [
            ref for ref in written(self.func, self.args, self.kwargs) if isinstance(ref, TensorRef)
        ]

    @cached_property
    def read(self) -> list[TensorRef]:
        """The arguments whose values it needs."""
        refs = [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, TensorRef)]
        if self.name in OVERWRITING and refs and refs[0] is self.args[0]:
            return refs[1:]
        return refs

    @cached_property
    def changed(self) -> frozenset[int]:
        """Storages that it makes or writes to."""
        refs = (*self.made.values(), *self.written)
        return frozenset(ref.storage for ref in refs)

    @cached_property
    def replaced(self) -> set[int]:
        """Storages whose former contents do not matter after this step."""
        found = {ref.storage for ref in self.made.values()}
        if self.name in OVERWRITING:
            found |= {ref.storage for ref in self.written if ref.is_whole}
        return found


def operator_name(func: Any) -> str:
    """The name of an operator without its overload: `normal_`."""
    return str(func.name()).partition("::")[2].partition(".")[0]


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors, or their references, that a call changes: `add_`, `add.out`, `_foreach_add_`."""
    name = operator_name(func)
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    if in_place and args:
        return list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
    return list(leaves({key: value for key, value in kwargs.items() if key.startswith("out")}))


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from leaves(one)
    else:
        yield value


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with `function` applied to everything in its nested lists, tuples and dicts.

    A tuple may have names.
    """
    if isinstance(value, list | tuple):
        parts = [mapped(one, function) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: mapped(one, function) for key, one in value.items()}
    return function(value)
