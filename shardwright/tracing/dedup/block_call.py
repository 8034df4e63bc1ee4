"""Records one call of a repeated block: its arguments, its calls of torch and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor

from shardwright.tracing.dedup.module_steps import (
    FunctionRecorder,
    NotComparableError,
    TensorMeta,
    tensor_meta,
)


@final
class BlockCall:
    """One call of a block, by its `number` in an export; `given` is its `shallow_form`."""

    def __init__(self, number: int, given: Any, steps: FunctionRecorder) -> None:
        self.number = number
        self.given = given
        self.steps = steps
        self.results: list[Tensor] = []  # returned tensors that recorded functions made
        self._returned: Any = None
        self._kinds: list[TensorMeta] = []  # of all its tensors

    def end(self, returned: Any) -> None:
        """Record the results of the call, and the metadata of all its tensors at its end.

        Sets `steps.refused` if the results cannot be compared, or if there are none.
        """
        try:
            self._returned = self._described(returned)
            self._kinds = [tensor_meta(t) for t in self.steps.tensors]
        except NotComparableError as e:
            self.steps.refused = self.steps.refused or str(e)
        if not self.results:
            self.steps.refused = self.steps.refused or "it returns nothing of its own"

    def kind(self, tensor: Tensor) -> TensorMeta:
        """The metadata, at the end of the call, of one of its tensors."""
        number = self.steps.number(tensor)
        assert number is not None
        return self._kinds[number]

    def traces_equally(self, other: BlockCall) -> bool:
        """Whether both calls made the same steps, so that their traces would be equal."""
        return (
            not self.steps.refused
            and not other.steps.refused
            and self._returned == other._returned
            and self.steps.pattern == other.steps.pattern
            and self.steps.steps == other.steps.steps
            and self._kinds == other._kinds
        )

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if self.steps.is_made(value) and not any(value is t for t in self.results):
                self.results.append(value)
            return self.steps.comparable(value)
        if isinstance(value, tuple | list):
            return type(value), tuple([self._described(part) for part in value])
        if isinstance(value, Mapping):
            return type(value), tuple((key, self._described(v)) for key, v in value.items())
        try:
            return self.steps.comparable(value)
        except NotComparableError:
            return type(value)  # tensors inside are not replaced; `TraceGuard` refuses their reads


def shallow_form(value: Any) -> Any:
    """A description of arguments: metadata of tensors, booleans, texts, and types of the rest.

    Numbers are described by their type alone, because they are often just counters.
    """
    if isinstance(value, Tensor):
        return tensor_meta(value)
    if isinstance(value, tuple | list):
        return tuple(shallow_form(part) for part in value)
    if isinstance(value, Mapping):
        return tuple((str(key), shallow_form(part)) for key, part in value.items())
    return value if value is None or isinstance(value, bool | str) else type(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, also inside of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def with_tensors(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """`value` with its tensors replaced; lists and dictionaries are changed in place."""
    if isinstance(value, Tensor):
        return new(value)
    if isinstance(value, list):
        for i, part in enumerate(value):
            value[i] = with_tensors(part, new)
    elif isinstance(value, dict):
        for key, part in list(value.items()):
            value[key] = with_tensors(part, new)
    elif isinstance(value, tuple):
        parts = [with_tensors(part, new) for part in value]
        if any(part is not old for part, old in zip(parts, value, strict=True)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
