"""Memory of redistributions on the ranks: copies, buffers of collectives, results.

It models `runtime/comm/collectives.py`: tiles are padded to equal sizes for a gather, and reordered
afterwards if a dimension other than the first was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from operator import add

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.op_memory import contiguous_strides
from shardwright.ir.redistribution import COLLECTIVES, ByKind, Collective, Exchange
from shardwright.machine.backends import BACKENDS, BackendSpec
from shardwright.program.instructions import Move, Shape
from shardwright.simulate.memory.allocator import Allocator, Use
from shardwright.simulate.memory.values import View


def moved(
    allocator: Allocator,
    view: View,
    moves: tuple[Move, ...],
    atoms: Shape,
    shape: Shape,
    sizes: Mapping[str, int],
    backend: BackendSpec,
) -> View:
    """`view` after `moves`, as by `_run` in `runtime/comm/redistribute.py`; owns its block.

    `atoms` is the shape in which the moves begin, `sizes` the mesh's. A backend without
    a reduce_scatter of its own scatters sums by summing a copy. `view` keeps its own owners.
    """
    allocator.own(view.block)
    if not moves:
        return View(view.block, view.shape, view.strides, view.dtype, view.grad)
    now = View(view.block, atoms, contiguous_strides(atoms), view.dtype, view.grad)
    if not view.contiguous:
        now = _copied(allocator, now, prod(atoms))
    for move in moves:
        now = _step(allocator, now, move, sizes[move.axis], backend)
    if not now.contiguous:
        now = _copied(allocator, now, prod(now.shape))
    return View(now.block, shape, contiguous_strides(shape), view.dtype, view.grad)


def moved_locally(allocator: Allocator, view: View, moves: tuple[Move, ...]) -> View:
    """`view`, whose owner is passed on, after moves without communication."""
    for move in moves:
        view = _step(allocator, view, move, 1, BACKENDS["gloo"])
    return view


def _step(allocator: Allocator, x: View, move: Move, size: int, backend: BackendSpec) -> View:
    if move.collective.moves_data and not x.contiguous:
        x = _copied(allocator, x, prod(x.shape))
    return STEPS[move.collective](allocator, x, move, size, backend)


def _slice(_allocator: Allocator, x: View, move: Move, _size: int, _backend: BackendSpec) -> View:
    return View(x.block, _cut(x, move), x.strides, x.dtype, x.grad)


def _mask(allocator: Allocator, x: View, move: Move, _size: int, _backend: BackendSpec) -> View:
    return x if move.keeps else _copied(allocator, x, prod(x.shape), first=False)


def _embed(allocator: Allocator, x: View, move: Move, _size: int, _backend: BackendSpec) -> View:
    return _exchanged(allocator, x, move.whole, 0, Use.WORKSPACE)


def _all_reduce(
    allocator: Allocator, x: View, _move: Move, _size: int, _backend: BackendSpec
) -> View:
    return _exchanged(allocator, x, x.shape, 0)


def _all_gather(
    allocator: Allocator, x: View, move: Move, size: int, _backend: BackendSpec
) -> View:
    padded = _padded(move, move.src, size)
    if _leads(move, move.src):
        return _exchanged(allocator, x, move.whole, 0, left=padded)
    return _exchanged(allocator, x, move.whole, padded)


def _reduce_scatter(
    allocator: Allocator, x: View, move: Move, size: int, backend: BackendSpec
) -> View:
    if not backend.native_reduce_scatter:
        return _exchanged(allocator, x, _cut(x, move), prod(move.whole))
    padded = _padded(move, move.dst, size)
    return _exchanged(allocator, x, _cut(x, move), padded, left=padded // size)


def _all_to_all(
    allocator: Allocator, x: View, move: Move, _size: int, _backend: BackendSpec
) -> View:
    shape = tuple(move.length if d == move.dst else n for d, n in enumerate(move.whole))
    joined = 0 if prod(shape[: move.src]) == 1 else prod(shape)
    return _exchanged(allocator, x, shape, prod(x.shape) + joined)


STEPS = ByKind[Callable[[Allocator, View, Move, int, BackendSpec], View]](
    "whose memory is known",
    {
        Collective.SLICE: _slice,
        Collective.MASK: _mask,
        Collective.EMBED: _embed,
        Collective.REDUCE_SCATTER: _reduce_scatter,
        Collective.ALL_TO_ALL: _all_to_all,
        Collective.ALL_REDUCE: _all_reduce,
        Collective.ALL_GATHER: _all_gather,
    },
    COLLECTIVES,
)

# Bytes in flight from what a rank sends and receives, beside operands and results.
_IN_FLIGHT = ByKind[Callable[[int, int], int]](
    "inside of one operator whose memory is known",
    {
        Exchange.SWAP: max,
        Exchange.RING: add,  # the block that is computed with is sent, the next one arrives
        Exchange.ROWS: add,
    },
    (Exchange.SWAP, Exchange.RING, Exchange.ROWS),
)


def exchange_bytes(kind: Exchange, sent: int, received: int) -> int:
    """Bytes in flight of an exchange inside of an operator, beside its operands and results."""
    return _IN_FLIGHT[kind](sent, received)


def _cut(x: View, move: Move) -> Shape:
    """The shape of this rank's tile along `move.dst`."""
    return (*x.shape[: move.dst], move.length, *x.shape[move.dst + 1 :])


def _leads(move: Move, dim: int) -> bool:
    """Whether tiles along `dim`, one after the other, are the whole."""
    return prod(move.whole[:dim]) == 1


def _padded(move: Move, dim: int, size: int) -> int:
    """Elements when every tile along `dim` is as long as the longest."""
    longest = -(-move.whole[dim] // size)
    return prod(move.whole) // max(1, move.whole[dim]) * longest * size


def _copied(allocator: Allocator, x: View, elements: int, *, first: bool = True) -> View:
    """A contiguous copy, in the place of `x`."""
    new = allocator.new(elements * ITEM_BYTES[x.dtype], like=x.block)
    allocator.drop(x.block)
    return View(new, x.shape, contiguous_strides(x.shape), x.dtype, x.grad)


def _exchanged(
    allocator: Allocator,
    x: View,
    shape: Shape,
    extra: int,
    use: Use = Use.COMMUNICATION,
    left: int = 0,
) -> View:
    """The result of a collective on `x`, with `extra` elements in use while it runs.

    Of `left` elements the result is a part.
    """
    item = ITEM_BYTES[x.dtype]
    buffer = allocator.new(extra * item, use, like=x.block)
    new = allocator.new(max(left, prod(shape)) * item, use, like=x.block)
    allocator.drop(buffer)
    allocator.drop(x.block)
    allocator.becomes(new, Use.WORKSPACE)
    return View(new, shape, contiguous_strides(shape), x.dtype, x.grad)
