"""Ring attention: keys and values circulate between devices; queries stay.

A device holds two blocks of keys and values at a time: it computes with one while it receives the
next (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.ir.graph import argument
from shardwright.program.instructions import Run, SharedAttention
from shardwright.runtime.attention.blockwise_attention import Rows, ScoreOptions, TileGradients
from shardwright.runtime.comm.p2p_group import P2PGroup, Wait
from shardwright.tracing.export.operators import to_torch
from shardwright.tracing.export.second_derivative import refuse_second_derivative


class TiledAttention(nn.Module):
    """One `SharedAttention` on the device of its place."""

    def __init__(self, instruction: SharedAttention, line: P2PGroup) -> None:
        super().__init__()
        one = instruction
        self.op, self.position, self.line = one.op, one.position, line
        self.queries, self.keys = one.queries, one.keys
        self.causal = bool(argument(one.op, 5, "is_causal", False))
        given = dict(one.op.kwargs)
        scale = given.get("scale")
        assert scale is None or isinstance(scale, float)
        self.scale, self.grouped = scale, bool(given.get("enable_gqa", False))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *given: Tensor) -> Tensor:
        """Tiles of queries, keys, values and, if there is one, mask: the tile of the result."""
        values = dict(zip(self.op.operands, given, strict=True))
        query, key, value, mask = (
            to_torch(argument(self.op, i, name), values, given[0].device)
            for i, name in enumerate(("query", "key", "value", "attn_mask"))
        )
        attend = self._around if self.keys else self._whole
        return attend(query, key, value, mask, self.queries[self.position])

    def _whole(
        self, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, runs: Sequence[Run]
    ) -> Tensor:
        """Attention of runs of queries over keys that are all on this device."""
        lengths = [length for _, length in runs]
        found = [
            torch.ops.shardwright.causal_rows(
                part, key, value, (*run, key.shape[-2]), self.scale, self.grouped
            )
            for run, part in zip(runs, query.split(lengths, -2), strict=True)
        ]
        return torch.cat(found, -2)

    def _around(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        runs: Sequence[Run],
    ) -> Tensor:
        """Attention over keys and values that circulate."""
        given, own = (query, key, value), 3 if self.grouped else 2  # dimensions that do not repeat
        many = torch.broadcast_shapes(*(x.shape[:-own] for x in given))
        query, key, value = (x.expand(*many, *x.shape[-own:]) for x in given)
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        options = ScoreOptions(scale, self.causal, key.shape[-3])
        result: Tensor = _Ring.apply(query, key, value, mask, self, runs, options)  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"queries={self.queries}, keys={self.keys}"


class _Ring(torch.autograd.Function):
    """Sends each device's keys and values around the ring, and returns their gradients to it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        ring: TiledAttention,
        runs: Sequence[Run],
        options: ScoreOptions,
    ) -> Tensor:
        rows = Rows(query, value.shape[-1], runs, options)
        block = _packed(key, value)
        for step in range(len(ring.keys)):
            owner, coming = _owners(ring, step)
            wait, after = _pass_on(ring, block, coming if step + 1 < len(ring.keys) else None)
            rows.add(*_split(block, key, value, ring, owner), mask, ring.keys[owner])
            wait()
            block = after
        result, normalizer = rows.results(query)
        ctx.save_for_backward(query, key, value, mask, result, normalizer)
        ctx.ring, ctx.runs, ctx.options = ring, runs, options
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention over a split sequence", "plan with its sequence whole")
        query, key, value, mask, result, normalizer = ctx.saved_tensors
        ring: TiledAttention = ctx.ring
        found = TileGradients(query, result, normalizer, grads[0], ctx.runs, ctx.options)
        exact = found.of_query.dtype
        of_mask = torch.zeros_like(mask, dtype=exact) if ctx.needs_input_grad[3] else None
        block = _packed(key, value)
        sums = torch.zeros_like(block, dtype=exact)
        count = len(ring.keys)
        for step in range(count):
            owner, coming = _owners(ring, step)
            own = torch.zeros_like(block, dtype=exact)
            before = torch.empty_like(own)  # gradients of this block from the other devices
            settle = _nothing
            if step:
                settle = ring.line.exchange([(_next(ring), sums)], [(_previous(ring), before)])
            wait, after = _pass_on(ring, block, coming if step + 1 < count else None)
            found.add(
                _split(block, key, value, ring, owner),
                _split(own, key, value, ring, owner),
                (mask, of_mask),
                ring.keys[owner],
            )
            wait()
            settle()
            if step:
                own += before
            block, sums = after, own
        home = torch.zeros_like(_packed(key, value), dtype=exact)
        ring.line.exchange([(_next(ring), sums)], [(_previous(ring), home)])()
        of_key, of_value = _split(home, key, value, ring, ring.position)
        of_query = found.of_query.flatten(-4, -3).to(query.dtype)
        return (
            of_query,
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            None if of_mask is None else of_mask.to(mask.dtype),
            None,
            None,
            None,
        )


def _next(ring: TiledAttention) -> int:
    return (ring.position + 1) % len(ring.keys)


def _previous(ring: TiledAttention) -> int:
    return (ring.position - 1) % len(ring.keys)


def _owners(ring: TiledAttention, step: int) -> tuple[int, int]:
    """The owners of the block that is here at a step, and of the block that comes next."""
    count = len(ring.keys)
    return (ring.position - step) % count, (ring.position - step - 1) % count


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values in one buffer."""
    return torch.cat([key.flatten(), value.flatten()])


def _split(
    block: Tensor, key: Tensor, value: Tensor, ring: TiledAttention, owner: int
) -> tuple[Tensor, Tensor]:
    """Views of a buffer as the keys and values of `owner`, in the shapes of `key` and `value`."""
    length = sum(size for _, size in ring.keys[owner])
    shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in (key, value)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    one, two = (part.view(shape) for part, shape in zip(block.split(sizes), shapes, strict=True))
    return one, two


def _pass_on(ring: TiledAttention, block: Tensor, coming: int | None) -> tuple[Wait, Tensor]:
    """Send a block to the next device and receive that of `coming` from the previous one."""
    if coming is None:
        return _nothing, block
    here, there = (sum(n for _, n in ring.keys[i]) for i in (_here(ring, coming), coming))
    after = block.new_empty(block.numel() // here * there)
    wait = ring.line.exchange([(_next(ring), block)], [(_previous(ring), after)])
    return wait, after


def _nothing() -> None:
    """Waits for nothing: no message is in flight."""


def _here(ring: TiledAttention, coming: int) -> int:
    """The owner of the block that is here while that of `coming` is received."""
    return (coming + 1) % len(ring.keys)
