"""Blockwise attention: keys in any order, without materialising all scores.

Each block of scores S = scale · Q Kᵀ + mask adds exp(S − m) V and Σ exp(S − m) to running sums,
where m is the maximum of each row so far; when m grows, the sums are rescaled (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018; Rabe and Staats, "Self-attention
does not need O(n²) memory", 2021). The backward pass needs only L = m + log Σ exp(S − m) of each
row: P = exp(S − L), and with D = Σ dO · O the gradient of S is P · (dO Vᵀ − D) (Dao et al.,
"FlashAttention", 2022). A block without a mask is computed by a fused kernel, where the device has
one (`fused_blocks.py`). This file does not know devices: rows and columns are given by their global
positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from shardwright.program.instructions import Run
from shardwright.runtime.attention.fused_blocks import Block, attend, gradients, kernel_of

_SCORES = 2**20  # scores of one block on a CPU, chosen to fit its caches
_SCORES_ON_GPU = 2**26


class ScoreOptions(NamedTuple):
    """Options of attention scores. Causal rows see the columns up to their own position."""

    scale: float
    causal: bool
    heads: int  # of keys; of queries there may be several to each


class TilePart(NamedTuple):
    """A block of rows and columns of scores: their slices of the tile and global positions."""

    rows: slice
    columns: slice
    first_row: int
    first_column: int
    masked: bool  # whether not all rows see all columns


@final
class Rows:
    """Accumulates the results of one tile of queries [..., heads, length, width] over blocks."""

    def __init__(
        self, query: Tensor, width: int, runs: Sequence[Run], options: ScoreOptions
    ) -> None:
        self.query = _grouped(query, options.heads)  # (..., heads of keys, queries of each, L, E)
        self.runs, self.options = runs, options
        shape = (*self.query.shape[:-1], width)
        exact = _exact(query.dtype)
        self.sums = torch.zeros(shape, dtype=exact, device=query.device)
        self.largest = self.sums.new_full(shape[:-1], float("-inf"))
        self.total = self.sums.new_zeros(shape[:-1])

    def add(self, key: Tensor, value: Tensor, mask: Tensor | None, runs: Sequence[Run]) -> None:
        """Add a block of keys and values [..., heads, length, width] at global positions `runs`."""
        kernel = kernel_of(self.query, key, value) if mask is None else None
        if kernel is not None:
            for part in triangles(self.runs, runs, self.options):
                block = _block(self.query, key, value, part)
                found = attend(kernel, block, causal=part.masked, scale=self.options.scale)
                self._join(part.rows, *found)
            return
        for part in parts(self.query, self.runs, runs, self.options):
            scores = _scores(self.query, key, mask, part, self.options)
            largest = self.largest[..., part.rows]
            now = torch.maximum(largest, scores.amax(-1))
            known = now.masked_fill(now == float("-inf"), 0.0)  # rows that see nothing yet
            shrunk = (largest - known).exp_()
            weights = (scores - known.unsqueeze(-1)).exp_()
            self.total[..., part.rows] = self.total[..., part.rows] * shrunk + weights.sum(-1)
            sums = self.sums[..., part.rows, :]
            sums.mul_(shrunk.unsqueeze(-1))
            sums += _times(weights.to(value.dtype), value[..., part.columns, :])
            self.largest[..., part.rows] = now

    def _join(self, rows: slice, result: Tensor, normalizer: Tensor) -> None:
        """Add what a fused kernel has found for a block: its result and the L of each row."""
        largest = self.largest[..., rows]
        now = torch.maximum(largest, normalizer)
        shrunk, weight = (largest - now).exp_(), (normalizer - now).exp_()
        self.total[..., rows] = self.total[..., rows] * shrunk + weight
        sums = self.sums[..., rows, :]
        sums.mul_(shrunk.unsqueeze(-1)).addcmul_(result.to(sums.dtype), weight.unsqueeze(-1))
        self.largest[..., rows] = now

    def results(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The result of attention, zeros for rows that attend to nothing, and L of each row."""
        nothing = self.total == 0
        result = self.sums / self.total.masked_fill(nothing, 1.0).unsqueeze(-1)
        normalizer = (self.largest + self.total.log()).masked_fill(nothing, float("inf"))
        return result.flatten(-4, -3).to(like.dtype), normalizer


@final
class TileGradients:
    """Accumulates the gradients of one tile of queries over blocks of keys and values."""

    def __init__(
        self,
        query: Tensor,
        result: Tensor,
        normalizer: Tensor,
        gradient: Tensor,
        runs: Sequence[Run],
        options: ScoreOptions,
    ) -> None:
        self.runs, self.options = runs, options
        self.query, self.given, self.result = (
            _grouped(x, options.heads) for x in (query, gradient, result)
        )
        exact = _exact(query.dtype)
        self.normalizer = normalizer
        of_row = gradient.to(exact) * result.to(exact)
        self.of_row = _grouped(of_row, options.heads).sum(-1)
        self.of_query = torch.zeros_like(self.query, dtype=exact)

    def add(
        self,
        block: tuple[Tensor, Tensor],
        sums: tuple[Tensor, Tensor],
        masks: tuple[Tensor | None, Tensor | None],
        runs: Sequence[Run],
    ) -> None:
        """Add a block of keys and values; its gradients are added to `sums` and the mask's."""
        (key, value), (of_key, of_value), (mask, of_mask) = block, sums, masks
        kernel = kernel_of(self.query, key, value) if mask is None else None
        if kernel is not None:
            for part in triangles(self.runs, runs, self.options):
                rows, columns = part.rows, part.columns
                found = gradients(
                    kernel, self.given[..., rows, :], _block(self.query, key, value, part),
                    self.result[..., rows, :], self.normalizer[..., rows],
                    causal=part.masked, scale=self.options.scale,
                )  # fmt: skip
                self.of_query[..., rows, :] += found[0]
                of_key[..., columns, :] += found[1]
                of_value[..., columns, :] += found[2]
            return
        for part in parts(self.query, self.runs, runs, self.options):
            rows, columns = part.rows, part.columns
            scores = _scores(self.query, key, mask, part, self.options)
            weights = scores.sub_(self.normalizer[..., rows].unsqueeze(-1)).exp_()
            query, given = self.query[..., rows, :], self.given[..., rows, :]
            of_value[..., columns, :] += _turned(weights.to(given.dtype), given)
            change = _times(given, value[..., columns, :].transpose(-2, -1)).to(scores.dtype)
            change = change.sub_(self.of_row[..., rows].unsqueeze(-1)).mul_(weights)
            if of_mask is not None:
                there = _cut(of_mask, part)
                there += _ungrouped(change).sum_to_size(there.shape)
            change = change.mul_(self.options.scale).to(query.dtype)
            self.of_query[..., rows, :] += _times(change, key[..., columns, :])
            of_key[..., columns, :] += _turned(change, query)


def _block(query: Tensor, key: Tensor, value: Tensor, part: TilePart) -> Block:
    there = part.columns
    return query[..., part.rows, :], key[..., there, :], value[..., there, :]


def triangles(
    rows: Sequence[Run], columns: Sequence[Run], options: ScoreOptions
) -> Iterator[TilePart]:
    """The parts of a tile for fused kernels: all of a block, or a square below its diagonal.

    >>> below = triangles([(4, 4)], [(2, 4)], ScoreOptions(1.0, True, 1))
    >>> [(part.first_row, part.first_column, part.masked) for part in below]
    [(4, 2, False), (4, 4, True), (6, 4, False)]
    """
    top = 0
    for row, length in rows:
        left = 0
        for column, width in columns:
            # Columns before `start` are seen by all rows from it on, and no others are by others.
            start = max(row, column) if options.causal else max(row + length, column + width)
            before = min(max(start - column, 0), width)
            under = min(max(start - row, 0), length) if options.causal else 0
            square = min(length - under, width - before) if options.causal else 0
            corners = (
                (row, row + length, column, column + before, False),
                (
                    row + under,
                    row + under + square,
                    column + before,
                    column + before + square,
                    True,
                ),
                (
                    row + under + square,
                    row + length,
                    column + before,
                    column + before + square,
                    False,
                ),
            )
            for first, last, begin, end, masked in corners:
                if first < last and begin < end:
                    yield TilePart(
                        slice(top + first - row, top + last - row),
                        slice(left + begin - column, left + end - column),
                        first,
                        begin,
                        masked,
                    )
            left += width
        top += length


def parts(
    query: Tensor, rows: Sequence[Run], columns: Sequence[Run], options: ScoreOptions
) -> Iterator[TilePart]:
    """The parts of a tile to compute; columns to which no row attends are omitted."""
    top = 0
    for row, length in rows:
        left = 0
        for column, width in columns:
            end = min(width, row + length - column) if options.causal else width
            if end > 0:
                each = query.shape[:-2].numel() * min(end, 1024)
                most = _SCORES if query.device.type == "cpu" else _SCORES_ON_GPU
                step = max(16, most // max(1, each))
                yield from _blocks((top, row, length, step), (left, column, end), options)
            left += width
        top += length


def _blocks(
    down: tuple[int, int, int, int], across: tuple[int, int, int], options: ScoreOptions
) -> Iterator[TilePart]:
    """The blocks of scores of some rows and columns; under a causal mask without empty ones."""
    (top, row, length, step), (left, column, width) = down, across
    for start in range(0, length, step):
        end = min(start + step, length)
        for first in range(0, width, 1024):
            last = min(first + 1024, width)
            if options.causal:  # up to the place of the last row
                last = min(last, row + end - column)
            if first >= last:
                break
            yield TilePart(
                slice(top + start, top + end),
                slice(left + first, left + last),
                row + start,
                column + first,
                options.causal and column + last - 1 > row + start,
            )


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, part: TilePart, options: ScoreOptions
) -> Tensor:
    """The scores of one block, in single precision at least, with mask and causal rule."""
    rows = query[..., part.rows, :]
    scores = _times(rows, key[..., part.columns, :].transpose(-2, -1))
    scores = scores.to(_exact(rows.dtype)).mul_(options.scale)
    if part.masked:
        down = torch.arange(rows.shape[-2], device=rows.device) + part.first_row
        across = torch.arange(scores.shape[-1], device=rows.device) + part.first_column
        scores.masked_fill_(across > down.unsqueeze(-1), float("-inf"))
    if mask is not None:
        own = _cut(mask, part)
        if own.dim() > 2:  # heads become those of keys and, of each, those of queries
            heads = (options.heads, -1) if own.shape[-3] > 1 else (1, 1)
            own = own.unflatten(-3, heads)
        if own.dtype == torch.bool:
            return scores.masked_fill_(~own, float("-inf"))
        scores += own
    return scores


def _cut(mask: Tensor, part: TilePart) -> Tensor:
    """The part of a mask that belongs to a block; its rows and columns may broadcast."""
    if mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., part.rows, :]
    return (
        mask[..., part.first_column : part.first_column + _length(part)]
        if (mask.shape[-1] > 1)
        else mask
    )


def _length(part: TilePart) -> int:
    return int(part.columns.stop - part.columns.start)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """(..., heads, L, E) as (..., heads of keys, queries of each, L, E)."""
    found: Tensor = x.unflatten(-3, (heads, -1))
    return found


def _ungrouped(x: Tensor) -> Tensor:
    return x.flatten(-4, -3)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """(..., heads, queries of each, L, K) times (..., heads, K, N), which is read once."""
    found = torch.matmul(x.flatten(-3, -2), y)
    rows: Tensor = found.unflatten(-2, x.shape[-3:-1])
    return rows


def _turned(x: Tensor, y: Tensor) -> Tensor:
    """xᵀ y, summed over the queries of each head of keys: (..., heads, K, N)."""
    return torch.matmul(x.flatten(-3, -2).transpose(-2, -1), y.flatten(-3, -2))


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: at least single precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
