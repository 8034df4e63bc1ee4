"""Simulated allocator: blocks with owners, and the moment of peak memory.

A block is the storage of tensors that share memory. As in torch, it is freed when its last owner
drops it. It is attributed to the module whose operator allocated it, or to none.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, final

from shardwright.simulate.memory.caching_allocator import Request


class Use(enum.IntEnum):
    """The purpose of a block."""

    GRADIENT = 0
    SAVED = 1  # autograd keeps it for the backward pass
    COMMUNICATION = 2
    WORKSPACE = 3  # everything else
    LASTING = 4  # alive before the step and after it: counted by those who know it


@final
class Block:
    """`bytes` of memory with `owners`, of which `savers` are nodes of the autograd graph.

    It belongs to `module`, the path of one or None, but for `shares`: (module, bytes) of parts
    of it that belong to others.
    """

    __slots__ = ("bytes", "module", "owners", "savers", "shares", "use")

    def __init__(self, size: int, use: Use, module: str | None = None) -> None:
        self.bytes, self.use, self.module = size, use, module
        self.owners = self.savers = 0
        self.shares: tuple[tuple[str | None, int], ...] = ()

    @property
    def counts_as(self) -> Use:
        """The present purpose of the block."""
        return Use.SAVED if self.savers and self.use is Use.WORKSPACE else self.use


class AllocatedBytes(NamedTuple):
    """Bytes that are alive, and what the allocator hands out beyond them."""

    total: int
    rounded: int

    def plus(self, other: AllocatedBytes, times: int = 1) -> AllocatedBytes:
        """Both together, the other one so many times."""
        return AllocatedBytes(
            self.total + times * other.total, self.rounded + times * other.rounded
        )


@final
class Allocator:
    """Counts live bytes, and records what is alive at the peak.

    `where` describes the current event and `peak_at` the event at the peak; new blocks are
    attributed to `module`. Block sizes are rounded up to multiples of `granularity`. With a list
    of `requests` every block that is taken or given back is added to it.
    """

    def __init__(self, granularity: int = 1) -> None:
        self.granularity = granularity
        self.rounded = self.peak_rounded = 0
        self.total = self.peak = 0
        self._high = AllocatedBytes(0, 0)  # where `total` was highest since `highest` was asked for
        self.where = self.peak_at = ""
        self.module: str | None = None
        # Every change as (module, use, bytes); the first `_at_peak` of them add up to the peak.
        self._changes: list[tuple[str | None, Use, int]] = []
        self._at_peak = 0
        self.requests: list[Request] | None = None

    def at_peak(self) -> Counter[tuple[str | None, Use]]:
        """Bytes at the peak by module and use; they add up to `peak`."""
        found: Counter[tuple[str | None, Use]] = Counter()
        for module, use, size in self._changes[: self._at_peak]:
            found[module, use] += size
        return +found

    @property
    def changes(self) -> int:
        """The number of changes so far, which is a moment of `highest_between`."""
        return len(self._changes)

    def highest_between(self, moments: Sequence[int]) -> list[Counter[Use]]:
        """Bytes by use at the highest moment between each two neighbouring moments."""
        now = Counter[Use]()
        for _, use, size in self._changes[: moments[0]]:
            now[use] += size
        found = []
        for begin, end in pairwise(moments):
            total = most = sum(now.values())
            best = now.copy()
            for _, use, size in self._changes[begin:end]:
                now[use] += size
                total += size
                if total > most:
                    most, best = total, now.copy()
            found.append(best)
        return found

    @property
    def level(self) -> AllocatedBytes:
        """The bytes that are alive now, and as the allocator rounds them."""
        return AllocatedBytes(self.total, self.rounded)

    def highest(self) -> AllocatedBytes:
        """The highest level since the last call, at its first moment."""
        found, self._high = self._high, self.level
        return found

    def new(self, size: int, use: Use = Use.WORKSPACE, *, module_of: Block | None = None) -> Block:
        """Allocate a block that its caller owns.

        It is attributed to the module of the block `module_of`, or to the module that runs now. A
        buffer of a collective often holds tensors of several modules, and is attributed to none
        unless `module_of` is given.
        """
        now = None if use is Use.COMMUNICATION else self.module
        block = Block(size, use, now if module_of is None else module_of.module)
        block.owners = 1
        if use is not Use.LASTING:
            self._change(block, 1)
        return block

    def own(self, block: Block) -> Block:
        """Add an owner to the block and return it."""
        block.owners += 1
        return block

    def drop(self, block: Block) -> None:
        """Remove an owner of the block."""
        block.owners -= 1
        assert block.owners >= 0, "a block is dropped more often than owned"
        if not block.owners and block.use is not Use.LASTING:
            self._change(block, -1)

    def save(self, block: Block) -> Block:
        """Add autograd to the owners of the block."""
        block.owners += 1
        block.savers += 1
        if block.savers == 1 and block.use is Use.WORKSPACE:
            self._note(block, Use.WORKSPACE, -1)
            self._note(block, Use.SAVED, 1)
        return block

    def unsave(self, block: Block) -> None:
        """Remove autograd from the owners of the block."""
        block.savers -= 1
        if not block.savers and block.use is Use.WORKSPACE:
            self._note(block, Use.SAVED, -1)
            self._note(block, Use.WORKSPACE, 1)
        self.drop(block)

    def grow(self, since: int, rounded: int, times: int) -> None:
        """Allocate for good, so many times, what was allocated and not freed since a moment.

        `since` is a number of `changes`, and `rounded` how many bytes were rounded up since then.
        """
        found: Counter[tuple[str | None, Use]] = Counter()
        for module, use, size in self._changes[since:]:
            found[module, use] += times * size
        more = [(module, use, size) for (module, use), size in found.items() if size]
        if not more:
            return
        self._changes += more
        self.total += sum(size for _, _, size in more)
        self.rounded += times * rounded
        if self.requests is not None:
            size = sum(size for _, _, size in more) // times + rounded
            first = -len(self.requests)  # no block's number
            self.requests += [Request(first - n, size, True) for n in range(times)]
        self._record()

    def becomes(self, block: Block, use: Use) -> None:
        """Change the purpose of the block."""
        if block.use is not use and block.use is not Use.LASTING:
            self._note(block, block.counts_as, -1)
            block.use = use
            self._note(block, block.counts_as, 1)

    def assign(self, block: Block, module: str | None, size: int) -> None:
        """Attribute `size` bytes of the block, or as many as are left, to `module`."""
        size = min(size, block.bytes - sum(given for _, given in block.shares))
        if size and block.module != module:
            block.shares += ((module, size),)
            if block.use is not Use.LASTING:
                self._changes.append((block.module, block.counts_as, -size))
                self._changes.append((module, block.counts_as, size))

    def briefly(self, size: int) -> None:
        """Allocate `size` bytes and free them at once."""
        # Else nothing is different afterwards.
        if self.requests is not None or self.total + size > self._high.total:
            self.drop(self.new(size))

    def _change(self, block: Block, sign: int) -> None:
        size = sign * block.bytes
        if self.requests is not None:
            self.requests.append(Request(id(block), block.bytes, sign > 0))
        self._note(block, block.counts_as, sign)
        self.rounded += sign * (-block.bytes % self.granularity)
        self.total += size
        self._record()

    def _record(self) -> None:
        """Record the level where it is the highest."""
        if self.total > self._high.total:
            self._high = self.level
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, self.where
            self._at_peak = len(self._changes)
            self.peak_rounded = self.rounded

    def _note(self, block: Block, use: Use, sign: int) -> None:
        rest = block.bytes
        for module, size in block.shares:
            self._changes.append((module, use, sign * size))
            rest -= size
        self._changes.append((block.module, use, sign * rest))
