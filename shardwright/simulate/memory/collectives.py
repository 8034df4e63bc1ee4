"""Memory of redistributions on the ranks: copies, buffers of collectives, results.

It follows `runtime.collectives`: tiles are padded to equal sizes where they are gathered, and put
in order afterwards where another dimension than the first was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import Move, Shape
from shardwright.simulate.memory.allocator import Allocator, Use
from shardwright.simulate.memory.values import View, contiguous_strides


def moved(
    heap: Allocator,
    view: View,
    moves: tuple[Move, ...],
    atoms: Shape,
    shape: Shape,
    sizes: Mapping[str, int],
    on_cpu: bool,
) -> View:
    """`view` after `moves`, as `runtime.redistribute._run` leaves it; a new owner of its block.

    `atoms` is the shape in which the moves begin, `sizes` the mesh's; with `on_cpu` sums are
    scattered by summing a copy. `view` keeps its own owners.
    """
    heap.own(view.block)
    if not moves:
        return View(view.block, view.shape, view.strides, view.dtype, view.grad)
    now = View(view.block, atoms, contiguous_strides(atoms), view.dtype, view.grad)
    if not view.contiguous:
        now = _copied(heap, now, prod(atoms))
    for move in moves:
        now = _step(heap, now, move, sizes[move.axis], on_cpu)
    if not now.contiguous:
        now = _copied(heap, now, prod(now.shape))
    return View(now.block, shape, contiguous_strides(shape), view.dtype, view.grad)


def _step(heap: Allocator, x: View, move: Move, size: int, on_cpu: bool) -> View:
    match move.collective:
        case Collective.SLICE:
            shape = (*x.shape[: move.dst], move.length, *x.shape[move.dst + 1 :])
            return View(x.block, shape, x.strides, x.dtype, x.grad)
        case Collective.MASK:
            return x if move.keeps else _copied(heap, x, prod(x.shape), first=False)
        case Collective.EMBED:
            return _exchanged(heap, x, move.whole, 0, Use.WORKSPACE)
    if not x.contiguous:
        x = _copied(heap, x, prod(x.shape))
    whole = prod(move.whole)
    match move.collective:
        case Collective.ALL_REDUCE:
            return _exchanged(heap, x, x.shape, 0)
        case Collective.ALL_GATHER:
            padded = _padded(move, move.src, size)
            if _leads(move, move.src):
                return _exchanged(heap, x, move.whole, 0, left=padded)
            return _exchanged(heap, x, move.whole, padded)
        case Collective.REDUCE_SCATTER:
            shape = (*x.shape[: move.dst], move.length, *x.shape[move.dst + 1 :])
            if on_cpu:
                return _exchanged(heap, x, shape, whole)
            padded = _padded(move, move.dst, size)
            return _exchanged(heap, x, shape, padded, left=padded // size)
        case Collective.ALL_TO_ALL:
            shape = tuple(move.length if d == move.dst else n for d, n in enumerate(move.whole))
            joined = 0 if prod(shape[: move.src]) == 1 else prod(shape)
            return _exchanged(heap, x, shape, prod(x.shape) + joined)
        case other:
            raise ValueError(f"{other} is no collective whose memory is known")


def _leads(move: Move, dim: int) -> bool:
    """Whether tiles along `dim`, one after the other, are the whole."""
    return prod(move.whole[:dim]) == 1


def _padded(move: Move, dim: int, size: int) -> int:
    """Elements when every tile along `dim` is as long as the longest."""
    longest = -(-move.whole[dim] // size)
    return prod(move.whole) // max(1, move.whole[dim]) * longest * size


def _copied(heap: Allocator, x: View, elements: int, *, first: bool = True) -> View:
    """A contiguous copy, in the place of `x`."""
    new = heap.new(elements * ITEM_BYTES[x.dtype], like=x.block)
    heap.drop(x.block)
    return View(new, x.shape, contiguous_strides(x.shape), x.dtype, x.grad)


def _exchanged(
    heap: Allocator,
    x: View,
    shape: Shape,
    extra: int,
    use: Use = Use.COMMUNICATION,
    left: int = 0,
) -> View:
    """What a collective makes of `x`, with `extra` elements beside for as long as it takes.

    Of `left` elements the result is a part.
    """
    item = ITEM_BYTES[x.dtype]
    buffer = heap.new(extra * item, use, like=x.block)
    new = heap.new(max(left, prod(shape)) * item, use, like=x.block)
    heap.drop(buffer)
    heap.drop(x.block)
    heap.becomes(new, Use.WORKSPACE)
    return View(new, shape, contiguous_strides(shape), x.dtype, x.grad)
