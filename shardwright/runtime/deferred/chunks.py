"""Computes tiles of recorded tensors in chunks of rows, where each element depends on itself alone.

torch fills a contiguous tensor of 16 or more elements with normal numbers in groups of 16, and with
uniform numbers one by one, so chunks that are multiples of 16 draw what one call draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from shardwright.runtime.deferred.random_states import RandomStates
from shardwright.runtime.deferred.ranges import Ranges, narrowed
from shardwright.runtime.deferred.steps import Constant, Step, TensorRef, leaves, mapped

CHUNK = 16 * 2**20  # bytes
_RETURNED = 33 * 2**20  # bytes
_GROUP = 16  # elements that normal numbers are drawn in
_DRAWS = {"normal_": "normal_", "uniform_": "uniform_", "randn": "normal_", "rand": "uniform_"}
_FILLS = frozenset(["zero_", "fill_", "zeros", "ones", "full"])
_POINTWISE = frozenset({"mul", "add", "sub", "div", "clamp", "neg"})
_POINTWISE |= {"mul_", "add_", "sub_", "div_", "clamp_", "neg_", "erfinv_"}
_MADE = frozenset(["randn", "rand", "zeros", "ones", "full"])


def scratch(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for `count` elements that goes back to the system when it is freed.

    The C library does so with blocks above 32 MiB, of which only the pages that are written take
    memory. Smaller ones it keeps, and between tiles that stay they cannot be used again.
    """
    size = max(count * dtype.itemsize, _RETURNED)
    return torch.empty(size, dtype=torch.uint8)[: count * dtype.itemsize].view(dtype)


@final
@dataclass(frozen=True)
class ChunkedSteps:
    """Steps that compute `target`, a contiguous tensor with a storage of its own."""

    target: TensorRef
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, target: TensorRef, steps: Sequence[Step]) -> ChunkedSteps | None:
        """The steps, if each computes element i of its result from elements i alone."""
        count = math.prod(target.shape)
        if not target.shape or target.span != (0, count) or not target.is_whole:
            return None
        suitable = all(_is_suitable(step, count) for step in steps)
        return cls(target, tuple(steps)) if suitable else None

    def tile(self, ranges: Ranges, states: RandomStates) -> torch.Tensor:
        """The elements of the target within `ranges`, contiguous."""
        sizes = [stop - start for start, stop in ranges]
        found = torch.empty(sizes, dtype=self.target.view.dtype)
        row = math.prod(self.target.shape[1:])
        first, last = ranges[0]
        generators = {
            step.number: torch.Generator().set_state(states.resolved(step.before))
            for step in self.steps
            if step.draws
        }
        for start, stop in _rows(self.target.shape[0], row, self.target.view.dtype.itemsize):
            if stop <= first and not generators:
                continue
            if start >= last and not generators:
                break
            values = self._chunk(start * row, stop * row, generators)
            low, high = max(start, first), min(stop, last)
            if low < high:
                values = values.view(stop - start, *self.target.shape[1:])
                part = ((low - start, high - start), *ranges[1:])
                found[low - first : high - first] = narrowed(values, part)
            del values  # before the next chunk
        for number, generator in generators.items():
            states.known[number] = generator.get_state()
        return found

    def _chunk(self, start: int, stop: int, generators: dict[int, torch.Generator]) -> torch.Tensor:
        memory: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False), torch.no_grad():
            for step in self.steps:
                _run(step, start, stop, memory, generators.get(step.number))
        return memory[self.target.storage]

    @staticmethod
    def draw(step: Step) -> bool:
        """Draw what `step` draws from the default generator in chunks; False if it cannot be."""
        refs = [*step.made.values(), *step.written]
        if len(refs) != 1 or not _is_suitable(step, math.prod(refs[0].shape)):
            return False
        (ref,) = refs
        for start, stop in _rows(math.prod(ref.shape), 1, ref.view.dtype.itemsize):
            _run(step, start, stop, {}, torch.default_generator)
        return True


def _rows(count: int, row: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of `row` elements, each of a multiple of 16 elements but for the last."""
    least = _GROUP // math.gcd(_GROUP, row) if row else 1
    rows = max(1, CHUNK // max(1, row * itemsize * least)) * least
    start = 0
    while start < count:
        stop = start + rows
        if (count - stop) * row < _GROUP:
            stop = count
        yield start, stop
        start = stop


def _run(
    step: Step,
    start: int,
    stop: int,
    memory: dict[int, torch.Tensor],
    generator: torch.Generator | None,
) -> None:
    """Execute a step on elements start to stop of all storages; `memory` has these elements."""

    def part(leaf: Any) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value
        if not isinstance(leaf, TensorRef):
            return leaf
        if leaf.storage not in memory:
            memory[leaf.storage] = scratch(stop - start, leaf.view.dtype)
        span = leaf.span
        assert span is not None, "suitable steps have contiguous arguments"
        low, high = max(span[0], start), min(span[1], stop)
        return memory[leaf.storage][low - start : max(low, high) - start]

    if step.name in _DRAWS:
        (ref,) = [*step.made.values(), *step.written]
        numbers = step.args[1:] if step.name.endswith("_") else ()
        keywords = {k: v for k, v in step.kwargs.items() if k in ("mean", "std", "from", "to")}
        if step.name.endswith("_"):
            getattr(part(ref), _DRAWS[step.name])(*numbers, **keywords, generator=generator)
        else:
            getattr(part(ref), _DRAWS[step.name])(generator=generator)
    elif step.name in _MADE:
        (ref,) = step.made.values()
        value = step.args[1] if step.name == "full" else float(step.name == "ones")
        part(ref).fill_(value)
    else:
        results = step.func(*mapped(step.args, part), **mapped(step.kwargs, part))
        for ref in step.made.values():
            memory[ref.storage] = results


def _is_suitable(step: Step, count: int) -> bool:
    given = [
        leaf for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, TensorRef | Constant)
    ]
    refs = [*step.made.values(), *(one for one in given if isinstance(one, TensorRef))]
    if any(isinstance(one, Constant) and one.value.dim() for one in given):
        return False
    spans = {ref.span for ref in refs}
    if len(spans) != 1 or None in spans:
        return False
    (span,) = spans
    filled = all(ref.nbytes == count * ref.view.dtype.itemsize for ref in refs)
    if not filled or not all(ref.view.dtype.is_floating_point for ref in refs):
        return False
    if step.name in _DRAWS:
        return span == (0, count) and count >= _GROUP and len(refs) == 1
    partial = span != (0, count)
    if step.name in _FILLS:
        return len(refs) == 1 and (not partial or step.name.endswith("_"))
    return step.name in _POINTWISE and (not partial or step.name.endswith("_"))
