"""Bucketed all-gather of sharded parameters and reduce-scatter of their gradients (FSDP).

A message's buffer holds, rank by rank, the rank's tiles one after the other,
each padded to the size of the largest. A bucket is one message, but for large copies on some
backends (`ir/buckets.py`). Under `torch.compile` each parameter goes its own way, and so it does
where the backward pass is differentiated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.buckets import gather_messages
from shardwright.program.instructions import Gather, Prefetch, Redistribute
from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.process_group import begun, gather_into, reduce_over
from shardwright.runtime.comm.redistribute import Redistribution
from shardwright.runtime.parameters.reshard_after_forward import Keep
from shardwright.runtime.parameters.unshard import Works


@dataclass(frozen=True)
class _Part:
    """A parameter that is sharded along dimension `dim` of its atoms, `ranks` ways."""

    before: tuple[int, ...]  # shape of this rank's tile
    after: tuple[int, ...]  # of the copy
    whole: tuple[int, ...]  # of the copy as its atoms
    dim: int
    ranks: int
    narrow: torch.dtype | None  # that it is sent in
    wide: torch.dtype | None  # that its gradient is sent in

    @cached_property
    def step(self) -> int:
        """Length of the largest tile along `dim`."""
        return -(-self.whole[self.dim] // self.ranks)

    @cached_property
    def inner(self) -> int:
        """Elements of the copy for each index along `dim`."""
        return prod(self.whole) // self.whole[self.dim]

    @cached_property
    def room(self) -> int:
        """Elements of the largest tile."""
        return self.step * self.inner

    def bytes(self, dtype: torch.dtype) -> int:
        """Of the copy."""
        return prod(self.after) * dtype.itemsize

    def length(self, rank: int) -> int:
        """Length of a rank's tile along `dim`."""
        return min(self.step, max(0, self.whole[self.dim] - rank * self.step))

    @cached_property
    def even(self) -> bool:
        """Whether all ranks' tiles are equally large."""
        return self.whole[self.dim] % self.ranks == 0

    @cached_property
    def as_sent(self) -> bool:
        """Whether the ranks' tiles, one after the other, are the copy."""
        return self.even and prod(self.whole[: self.dim]) == 1

    @cached_property
    def _by_rank(self) -> tuple[int, ...]:
        """Shape of the tiles, one for each rank, where all are equally large."""
        return (self.ranks, *self.whole[: self.dim], self.step, *self.whole[self.dim + 1 :])

    @cached_property
    def _ranks_within(self) -> tuple[int, ...]:
        """Shape of the copy as its atoms, where the ranks' tiles are equally large."""
        return (*self.whole[: self.dim], self.ranks, self.step, *self.whole[self.dim + 1 :])

    def opened(self, rows: torch.Tensor) -> torch.Tensor:
        """The copy, of the ranks' tiles with their padding, a row each."""
        if self.as_sent:
            return rows.contiguous().view(self.after)
        if self.even:
            # Contiguous first, and so in memory of its own: as views tiles of length 1 would do.
            return rows.view(self._by_rank).movedim(0, self.dim).contiguous().view(self.after)
        tiles = [self._tile(row, rank) for rank, row in enumerate(rows)]
        return torch.cat(tiles, self.dim).view(self.after)

    def closed(self, grad: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the tiles of the copy's gradient, with their padding, into a row for each rank."""
        if self.as_sent and grad.is_contiguous():
            rows.copy_(grad.view(self.ranks, self.room))
        elif self.even:
            tiles = grad.reshape(self._ranks_within).movedim(self.dim, 0)
            rows.view(self._by_rank).copy_(tiles)
        else:
            grad = grad.reshape(self.whole)
            for rank, row in enumerate(rows):
                length, start = self.length(rank), min(rank * self.step, self.whole[self.dim])
                self._tile(row, rank).copy_(grad.narrow(self.dim, start, length))
                row[length * self.inner :].zero_()

    def _tile(self, row: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's tile in its shape, without padding."""
        shape = list(self.whole)
        shape[self.dim] = self.length(rank)
        return row[: prod(shape)].view(shape)


class _Message(NamedTuple):
    """Copies on their way: their numbers in the bucket, and the buffer in which they arrive."""

    numbers: Sequence[int]
    work: Waited
    buffer: torch.Tensor


class _Flight:
    """One call's gather of a bucket, and what the backward pass needs to make it again."""

    def __init__(
        self, how: Departure, tiles: Sequence[torch.Tensor], before: _Flight | None
    ) -> None:
        self.how, self.before = how, before
        self.tiles = [tile.detach() for tile in tiles]
        self.users: Counter[int] = Counter()  # operators that will want a copy again, by number
        self._sent: list[_Message] = []
        self._again: dict[int, torch.Tensor] = {}

    def start(self) -> None:
        """Send for all copies."""
        self._sent = self.how.send(self.tiles, range(len(self.tiles)))

    def arrive(self) -> dict[int, torch.Tensor]:
        """The copies that were sent for, waited for; they are the caller's alone."""
        sent, self._sent = self._sent[::-1], []
        found: dict[int, torch.Tensor] = {}
        while sent:
            numbers, work, buffer = sent.pop()
            wait_for(work, f"copies of {self.how.names}")
            del work  # it holds the buffer
            found.update(zip(numbers, self.how.opened(buffer, numbers), strict=True))
            del buffer
        return dict(sorted(found.items()))

    def again(self, number: int) -> torch.Tensor:
        """A copy that is wanted again; the first that is gathers all, each goes with its last."""
        if number not in self._again and self._sent:
            self._again.update(self.arrive())
        if number not in self._again:
            self.users[number] = max(1, self.users[number])  # also in a second backward pass
            self.start_again()
            self._again.update(self.arrive())
        if self.before is not None:
            self.before.start_again()  # which the backward pass wants next
        copy = self._again[number]
        self.users[number] -= 1
        if self.users[number] <= 0:
            del self._again[number]
        return copy

    def start_again(self) -> None:
        """Send for the copies that are wanted again and not there, if any is."""
        wanted = [n for n, users in self.users.items() if users > 0 and n not in self._again]
        if wanted and not self._sent:
            self._sent = self.how.send(self.tiles, sorted(wanted))


class Departure(nn.Module):
    """One `Prefetch` instruction on a device mesh, given axis by axis."""

    def __init__(self, instruction: Prefetch, axes: Mapping[str, DeviceMesh]) -> None:
        super().__init__()
        mesh = axes[instruction.axis]
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.rank = mesh.get_local_rank()
        self.parts = [_part(one, self.ranks) for one in instruction.parts]
        self.names = ", ".join(f"%{one.value}" for one in instruction.parts)
        self.text = str(instruction)

    def forward(self, *given: Any) -> _Flight | None:
        """The copies on their way; a compiler finds its own."""
        if torch.compiler.is_compiling():
            return None
        count = len(self.parts)
        flight = _Flight(self, given[:count], given[count] if len(given) > count else None)
        flight.start()
        return flight

    @torch.no_grad()
    def send(self, tiles: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[_Message]:
        """Those tiles sent to all ranks."""
        parts = [self.parts[number] for number in numbers]
        sizes = [part.bytes(part.narrow or tiles[0].dtype) for part in parts]
        messages = _messages(parts, sizes, self.group)
        return [self._message(tiles, [numbers[i] for i in places]) for places in messages]

    def _message(self, tiles: Sequence[torch.Tensor], numbers: Sequence[int]) -> _Message:
        """Some of them, in one buffer."""
        buffer = self.packed(tiles, numbers)
        return _Message(numbers, gather_into(buffer, self.group, self.rank), buffer)

    def packed(self, tiles: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
        """The buffer of a message, with this rank's tiles."""
        room = sum(self.parts[number].room for number in numbers)
        dtype = self.parts[numbers[0]].narrow or tiles[numbers[0]].dtype
        buffer = tiles[numbers[0]].new_empty(room * self.ranks, dtype=dtype)
        # This rank's tiles are where they will be, so nothing else is held until all are there.
        own = buffer.narrow(0, self.rank * room, room)
        places = own.split([self.parts[number].room for number in numbers])
        for number, place in zip(numbers, places, strict=True):
            tile = tiles[number].reshape(-1)
            if not self.parts[number].even:
                place[tile.numel() :].zero_()
                place = place[: tile.numel()]
            place.copy_(tile)
        return buffer

    @torch.no_grad()
    def opened(self, buffer: torch.Tensor, numbers: Sequence[int]) -> list[torch.Tensor]:
        """The copies that have arrived, each in memory of its own."""
        parts = [self.parts[number] for number in numbers]
        if len(parts) == 1 and parts[0].as_sent:
            return [buffer.view(parts[0].after)]
        rows = buffer.view(self.ranks, -1).split([part.room for part in parts], dim=1)
        return [part.opened(tiles) for part, tiles in zip(parts, rows, strict=True)]

    def extra_repr(self) -> str:
        return self.text


class Arrival(nn.Module):
    """One `Gather` instruction on a device mesh, given axis by axis."""

    def __init__(self, instruction: Gather, axes: Mapping[str, DeviceMesh]) -> None:
        super().__init__()
        mesh = axes[instruction.axis]
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.rank = mesh.get_local_rank()
        self.summed = [axes[axis].get_group() for axis in instruction.summed]
        self.parts = [_part(one, self.ranks) for one in instruction.parts]
        self.alone = nn.ModuleList(Redistribution(one, axes) for one in instruction.parts)
        self.copied = instruction.copied
        self.text = str(instruction)

    def forward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """The copies, of their tiles, the list of works and the flight."""
        *tiles, works, flight = given
        if torch.compiler.is_compiling():
            return tuple(one(tile) for one, tile in zip(self.alone, tiles, strict=True))
        if not torch.is_grad_enabled():
            return tuple(flight.arrive().values())
        copies: tuple[torch.Tensor, ...] = _Gathered.apply(self, works, flight, *tiles)  # type: ignore[no-untyped-call]
        return copies

    def reduced(self, grads: Sequence[torch.Tensor | None], works: Works) -> list[Any]:
        """This rank's tiles of the gradients of the copies; true once `works` are done."""
        found: list[torch.Tensor | None] = [None] * len(grads)
        known = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        while known and works:  # so that no more than one bucket of gradients is on its way
            wait_for(works.pop(), "sums of gradients")
        parts = [self.parts[i] for i, _ in known]
        sizes = [
            part.bytes(part.wide or g.dtype) for part, (_, g) in zip(parts, known, strict=True)
        ]
        for places in _messages(parts, sizes, self.group):
            given = self.joined([known[place] for place in places])
            own = given.new_empty(given.numel() // self.ranks)
            works.append(self._scattered(own, given))
            rooms = own.split([parts[place].room for place in places])
            for place, tile in zip(places, rooms, strict=True):
                shape = parts[place].before
                found[known[place][0]] = tile[: prod(shape)].view(shape)
        return found

    def joined(self, known: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Gradients in one buffer to sum in: one that is alone and nobody else's is that itself."""
        (i, grad), part = known[0], self.parts[known[0][0]]
        if len(known) == 1 and part.as_sent:
            whole = (grad if part.wide is None else grad.to(part.wide)).contiguous()
            own = not self.copied[i] or whole.data_ptr() != grad.data_ptr()
            return (whole if own else whole.clone()).view(-1)
        parts = [self.parts[number] for number, _ in known]
        rooms = [part.room for part in parts]
        given = grad.new_empty(self.ranks, sum(rooms), dtype=part.wide or grad.dtype)
        for part, (_, grad), rows in zip(parts, known, given.split(rooms, dim=1), strict=True):
            part.closed(grad, rows)
        return given.view(-1)

    def _scattered(self, own: torch.Tensor, given: torch.Tensor) -> Waited:
        """The ranks' sum of this rank's part of `given` on its way into `own`."""
        backend = backend_of(self.group)
        if not self.summed:
            return backend.begin_reduce_scatter(self.group, own, given, self.rank)
        backend.reduce_scatter(self.group, own, given, self.rank)
        *others, last = self.summed
        for group in others:
            reduce_over(group, own)
        return begun(last, own)

    def extra_repr(self) -> str:
        return self.text


class Remade:
    """How a `ReshardAfterForward` makes one of a bucket's copies again."""

    def __init__(self, number: int) -> None:
        self.number = number

    def keep(self, flight: _Flight, _how: Keep) -> Callable[[], _Flight]:
        """The bucket's flight, which one operator more will ask."""
        flight.users[self.number] += 1
        return lambda: flight

    def run_forward(self, flight: _Flight) -> torch.Tensor:
        """The copy."""
        return flight.again(self.number)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: Arrival, works: Works, flight: _Flight, *_tiles: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how, ctx.works = how, works
        return tuple(flight.arrive().values())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            alone = zip(ctx.how.alone, grads, strict=True)
            return (None, None, None, *(None if g is None else r.sent_back(g) for r, g in alone))
        return (None, None, None, *ctx.how.reduced(grads, ctx.works))


def _part(one: Redistribute, ranks: int) -> _Part:
    (move,) = one.forward
    narrow, wide = one.cast or ("", "")
    return _Part(
        one.before,
        one.after,
        move.whole,
        move.src,
        ranks,
        getattr(torch, narrow, None),
        getattr(torch, wide, None),
    )


def _messages(
    parts: Sequence[_Part], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[list[int]]:
    copies = ((size, part.as_sent) for part, size in zip(parts, sizes, strict=True))
    return gather_messages(copies, backend_of(group).spec.alone_bytes)
