"""Computes tensors of a recording: the recorded calls that a tensor depends on, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from shardwright.runtime.deferred.chunks import ChunkedSteps, scratch
from shardwright.runtime.deferred.random_states import RandomStates
from shardwright.runtime.deferred.ranges import Ranges, narrowed
from shardwright.runtime.deferred.steps import (
    OVERWRITING,
    Constant,
    Step,
    TensorRef,
    leaves,
    mapped,
)


class NoValueError(ValueError):
    """A tensor, or a part of one, to which nothing has given values."""


@final
class Replay:
    """Executes recorded `steps`; `states` has the random states before them."""

    def __init__(self, steps: Sequence[Step], states: RandomStates) -> None:
        self.steps, self.states = steps, states

    def whole(self, ref: TensorRef) -> torch.Tensor:
        """The values of `ref` after all steps; a call on it would return the same.

        Raises `NoValueError` if there are elements that no step has written.
        """
        live, roots = self._needed(ref)
        return self._executed(ref, live, roots)

    def tile(self, ref: TensorRef, ranges: Ranges) -> torch.Tensor:
        """The elements of `ref` within `ranges`, contiguous; raises `NoValueError` likewise.

        What consists of operators element by element is computed in chunks; else the whole tensor
        is, one at a time.
        """
        live, roots = self._needed(ref)
        if not roots and (chunks := ChunkedSteps.of(ref, live)) is not None:
            return chunks.tile(ranges, self.states)
        whole = self._executed(ref, live, roots)
        return narrowed(whole, ranges).clone(memory_format=torch.contiguous_format)

    def check(self, ref: TensorRef) -> None:
        """Raise `NoValueError` where it is known, without computing, that there are no values."""
        live, roots = self._needed(ref)
        if roots and not live:
            raise NoValueError("nothing has given it values")

    def steps_of(self, ref: TensorRef) -> list[Step]:
        """The steps that `ref` depends on."""
        return self._needed(ref)[0]

    def draw(self, step: Step) -> None:
        """Execute a step for its effect on the default generator."""
        with torch.no_grad():
            if not ChunkedSteps.draw(step):
                run = _Execution(range(0))
                for ref in step.read:
                    _, roots = self._needed(ref, step.number)
                    value = self._executed(ref, self._needed(ref, step.number)[0], roots)
                    run.put(ref, value)
                run.run(step)

    def _needed(self, ref: TensorRef, end: int | None = None) -> tuple[list[Step], set[int]]:
        """The steps before `end` that `ref` depends on, and storages that are read before any."""
        needed = {ref.storage}
        live: list[Step] = []
        for step in reversed(self.steps[:end]):
            if needed.isdisjoint(step.changed):
                continue
            live.append(step)
            needed -= step.replaced
            needed |= {one.storage for one in step.read}
            if not needed:
                break
        return live[::-1], needed

    def _executed(self, ref: TensorRef, live: Sequence[Step], roots: Iterable[int]) -> torch.Tensor:
        """The value of `ref` after the steps that it depends on, which are executed in order."""
        saved = torch.default_generator.get_state()
        try:
            with torch.inference_mode(False), torch.no_grad():
                run = _Execution(roots)
                last = {one.storage: i for i, s in enumerate(live) for one in _refs(s)}
                for i, step in enumerate(live):
                    if step.draws:
                        torch.default_generator.set_state(self.states.resolved(step.before))
                    run.run(step)
                    if step.draws:
                        self.states.known[step.number] = torch.default_generator.get_state()
                    for one in {one.storage for one in _refs(step)} - {ref.storage}:
                        if last[one] == i:
                            run.memory.pop(one, None)
                return run.value(ref)
        finally:
            torch.default_generator.set_state(saved)


@dataclass
class _Execution:
    """Memory of storages while steps run; of those in `roots` it is known what has been written."""

    roots: Iterable[int]
    memory: dict[int, torch.Tensor] = field(default_factory=dict)
    unwritten: dict[int, torch.Tensor] = field(default_factory=dict)  # a flag for each byte

    def run(self, step: Step) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                return leaf.view.on(self._of(leaf))
            return leaf.value.clone() if isinstance(leaf, Constant) else leaf

        for ref in step.read:
            if self._has_unwritten(ref):
                raise NoValueError(f"{step.func} reads elements that nothing has given values")
        results = list(leaves(step.func(*mapped(step.args, real), **mapped(step.kwargs, real))))
        for i, ref in step.made.items():
            self.put(ref, results[i])
        if step.name in OVERWRITING:
            for ref in step.written:
                if ref.storage in self.unwritten:
                    self._flags(ref).zero_()

    def put(self, ref: TensorRef, value: torch.Tensor) -> None:
        """Let `value` be the contents of `ref`, in a storage of its size."""
        same = value.stride() == ref.view.stride and value.storage_offset() == ref.view.offset
        if not same or value.untyped_storage().nbytes() != ref.nbytes:
            memory = torch.empty(ref.nbytes // ref.view.dtype.itemsize, dtype=ref.view.dtype)
            ref.view.on(memory).copy_(value)
            value = memory
        self.memory[ref.storage] = value

    def value(self, ref: TensorRef) -> torch.Tensor:
        memory = self._of(ref)
        if self._has_unwritten(ref):
            raise NoValueError("nothing has given values to all of its elements")
        return ref.view.on(memory)

    def _of(self, ref: TensorRef) -> torch.Tensor:
        if ref.storage not in self.memory:
            count = ref.nbytes // ref.view.dtype.itemsize
            self.memory[ref.storage] = scratch(count, ref.view.dtype)
            if ref.storage in self.roots:
                self.unwritten[ref.storage] = torch.ones(ref.nbytes, dtype=torch.bool)
        return self.memory[ref.storage]

    def _flags(self, ref: TensorRef) -> torch.Tensor:
        view, size = ref.view, ref.view.dtype.itemsize
        flags = self.unwritten[ref.storage]
        strides = tuple(stride * size for stride in view.stride)
        return flags.as_strided(view.size, strides, view.offset * size)

    def _has_unwritten(self, ref: TensorRef) -> bool:
        self._of(ref)
        return ref.storage in self.unwritten and bool(self._flags(ref).any())


def _refs(step: Step) -> list[TensorRef]:
    return [
        *step.made.values(),
        *(x for x in leaves((step.args, step.kwargs)) if isinstance(x, TensorRef)),
    ]
