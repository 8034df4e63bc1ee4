"""Records one call of a repeated block: its arguments, its operators, its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import Tensor

from shardwright.tracing.dedup.module_steps import Kind, Steps, UnlikeError, kind_of


@final
class BlockCall:
    """A call by its `number` in an export. `given` is what it is given, as seen at a glance."""

    def __init__(self, number: int, given: Any, steps: Steps) -> None:
        self.number = number
        self.given = given
        self.steps = steps
        self.results: list[Tensor] = []  # among what it returned, those that it made
        self._returned: Any = None
        self._kinds: list[Kind] = []  # of all its tensors

    def end(self, returned: Any) -> None:
        """Note what it returned, and what its tensors are."""
        try:
            self._returned = self._described(returned)
            self._kinds = [kind_of(t) for t in self.steps.tensors]
        except UnlikeError as e:
            self.steps.refused = self.steps.refused or str(e)
        if not self.results:
            self.steps.refused = self.steps.refused or "it returns nothing of its own"

    def kind(self, tensor: Tensor) -> Kind:
        """That of one of its tensors."""
        number = self.steps.number(tensor)
        assert number is not None
        return self._kinds[number]

    def is_like(self, other: BlockCall) -> bool:
        """Whether it did the same, so that tracing it would give the same."""
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
            return self.steps.told(value)
        if isinstance(value, tuple | list):
            return type(value), tuple([self._described(part) for part in value])
        if isinstance(value, Mapping):
            return type(value), tuple((key, self._described(v)) for key, v in value.items())
        try:
            return self.steps.told(value)
        except UnlikeError:
            return type(value)  # tensors that it may hold do not get into the trace


def at_a_glance(value: Any) -> Any:
    """What a call is given, up to what often only counts: numbers."""
    if isinstance(value, Tensor):
        return kind_of(value)
    if isinstance(value, tuple | list):
        return tuple(at_a_glance(part) for part in value)
    if isinstance(value, Mapping):
        return tuple((str(key), at_a_glance(part)) for key, part in value.items())
    return value if value is None or isinstance(value, bool | str) else type(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those of arguments, in containers that can be looked into."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def exchanged(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """`value` with other tensors, in the same containers where these can change."""
    if isinstance(value, Tensor):
        return new(value)
    if isinstance(value, list):
        for i, part in enumerate(value):
            value[i] = exchanged(part, new)
    elif isinstance(value, dict):
        for key, part in list(value.items()):
            value[key] = exchanged(part, new)
    elif isinstance(value, tuple):
        parts = [exchanged(part, new) for part in value]
        if any(part is not old for part, old in zip(parts, value, strict=True)):
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
