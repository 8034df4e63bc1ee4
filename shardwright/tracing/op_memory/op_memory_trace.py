"""Traces the memory of one operator call: the storages that it allocates, saves and frees.

The call runs under autograd, forward and backward. Every storage gets a number, and its allocation
and its release are recorded. The values of the operands are uninitialised; on the meta device
nothing is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from shardwright.ir.graph import Op
from shardwright.ir.op_memory import BackwardMemory, ForwardMemory, Seen, Strides
from shardwright.tracing.export.operators import operator_of, to_torch
from shardwright.tracing.torch_private import TorchDispatchMode, tree_leaves


class _Source(torch.autograd.Function):
    """Creates an operand as a non-leaf tensor, which only operators that save it keep alive.

    A leaf would be kept alive by its node for the accumulation of gradients.
    """

    @staticmethod
    def forward(ctx: Any, anything: torch.Tensor, seen: Seen) -> torch.Tensor:
        return _tensor(seen, anything.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Sink(torch.autograd.Function):
    """Reads results; its backward pass returns uninitialised gradients with given strides."""

    @staticmethod
    def forward(ctx: Any, strides: tuple[Strides | None, ...], *results: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.device = results[0].device
        ctx.forms = [(r.shape, s, r.dtype) for r, s in zip(results, strides, strict=True)]
        return torch.empty((), device=ctx.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        made = (
            None if s is None else torch.empty_strided(shape, s, dtype=dtype, device=ctx.device)
            for shape, s, dtype in ctx.forms
        )
        return (None, *made)


def _tensor(seen: Seen, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, seen.dtype)
    return torch.empty_strided(seen.shape, seen.strides, dtype=dtype, device=device)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Storages(TorchDispatchMode):
    """Numbers storages in the order of allocation and records allocations and releases.

    `events` has pairs: (number, bytes) for an allocation, (number, -1) for a release. `sizes` has
    the bytes of each storage.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        self._numbers: dict[int, int] = {}
        self._watched: list[weakref.ref[Any]] = []

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the storage of `tensor`; a storage not seen before gets the next number."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._numbers:
            number = self._numbers[key] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self.events.append((number, storage.nbytes()))

            def gone(_: Any) -> None:
                del self._numbers[key]
                self.events.append((number, -1))

            self._watched.append(weakref.ref(storage, gone))
        return self._numbers[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.number(tensor)
        return found


@final
class OpMemoryTrace:
    """Traces one call of `op`, either forward or backward; each trace needs a new object.

    `names` are the names of the operands, each once, and `given` describes them in the same order.
    `forward` returns the memory of the forward pass. `backward` returns that of the backward pass;
    its argument has the strides, in elements, of each result's gradient, or None for a result that
    gets no gradient. Both raise torch's errors for an operator that cannot run on `device`.
    """

    def __init__(
        self, op: Op, names: Sequence[str], given: tuple[Seen, ...], device: torch.device
    ) -> None:
        self.op, self.names, self.given, self.device = op, names, given, device
        self.storages = _Storages()
        self.saved: list[int] = []

    def forward(self) -> ForwardMemory:
        operands = self._operands()
        with self.storages, torch.enable_grad():
            first = len(self.storages.events)
            results = self._call(operands)
            events = self.storages.events[first:]
            found = tuple(
                None
                if r is None
                else (self.storages.number(r), tuple(r.shape), r.stride(), _dtype(r))
                for r in results
            )
            made = tuple(self.storages.sizes[len(self.given) :])
        return ForwardMemory(found, made, tuple(dict.fromkeys(self.saved)), _most(events))

    def backward(self, gradients: tuple[Strides | None, ...]) -> BackwardMemory:
        operands = self._operands()
        edges = [
            get_gradient_edge(x) if seen.requires_grad else None
            for x, seen in zip(operands, self.given, strict=True)
        ]
        with self.storages, torch.enable_grad():
            results = self._call(operands)
            made = len(self.storages.sizes)
            wanted = [
                (r, s)
                for r, s in zip(results, gradients, strict=True)
                if r is not None and s is not None
            ]
            total = _Sink.apply(tuple(s for _, s in wanted), *(r for r, _ in wanted))  # type: ignore[no-untyped-call]
            one = torch.empty((), device=self.device)
            del operands, results, wanted
            first, before = len(self.storages.events), len(self.storages.sizes)
            asked = [edge for edge in edges if edge is not None]
            came = list(torch.autograd.grad(total, asked, one, allow_unused=True))
            events = self.storages.events[first:]
            ends = iter(
                None if grad is None else (self.storages.number(grad), grad.stride())
                for grad in came
            )
            numbers = [None if edge is None else next(ends) for edge in edges]

        def again(number: int) -> int:
            return number if number < made else number - before + made

        return BackwardMemory(
            tuple((again(n), size) for n, size in events if not made <= n < before),
            tuple(None if end is None else (again(end[0]), end[1]) for end in numbers),
        )

    def _operands(self) -> list[torch.Tensor]:
        anything = torch.empty((), device=self.device, requires_grad=True)
        found: list[torch.Tensor] = [
            _Source.apply(anything, seen) if seen.requires_grad else _tensor(seen, self.device)  # type: ignore[no-untyped-call]
            for seen in self.given
        ]
        for x in found:
            self.storages.number(x)
        return found

    def _call(self, operands: list[torch.Tensor]) -> list[torch.Tensor | None]:
        values = dict(zip(self.names, operands, strict=True))
        args = [to_torch(a, values, self.device) for a in self.op.args]
        kwargs = {key: to_torch(value, values, self.device) for key, value in self.op.kwargs}

        def pack(kept: torch.Tensor) -> torch.Tensor:
            self.saved.append(self.storages.number(kept))
            return kept.detach()

        with saved_tensors_hooks(pack, lambda kept: kept):
            found = operator_of(self.op.target)(*args, **kwargs)
        return [found] if isinstance(found, torch.Tensor) else list(found)


def _most(events: Sequence[tuple[int, int]]) -> int:
    now = most = 0
    born: dict[int, int] = {}
    for number, size in events:
        if size >= 0:
            born[number] = size
            now += size
        else:
            now -= born.pop(number, 0)
        most = max(most, now)
    return most
