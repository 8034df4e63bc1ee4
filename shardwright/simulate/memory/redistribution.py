"""Memory of redistributions on the ranks, one move after the other.

It models `runtime/comm/redistribute.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.op_memory import contiguous_strides
from shardwright.ir.redistribution import LOCAL, ByKind, Collective
from shardwright.machine.backends import BackendSpec
from shardwright.program.instructions import Move, Shape
from shardwright.program.step.instructions import Part, after_transfer
from shardwright.simulate.memory.allocator import Allocator, Use
from shardwright.simulate.memory.collectives import SentTensors, started
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

    `atoms` is the shape in which the moves begin, `sizes` the mesh's. `view` keeps its own owners.
    """
    allocator.own(view.block)
    if not moves:
        return View(view.block, view.shape, view.strides, view.dtype, view.grad)
    now = View(view.block, atoms, contiguous_strides(atoms), view.dtype, view.grad)
    if not view.contiguous:
        now = _copied(allocator, now)
    for move in moves:
        if move.collective.moves_data:
            now = _communicated(allocator, now, move, sizes[move.axis], backend)
        else:
            now = moved_locally(allocator, now, (move,))
    if not now.contiguous:
        now = _copied(allocator, now)
    return View(now.block, shape, contiguous_strides(shape), view.dtype, view.grad)


def moved_locally(allocator: Allocator, view: View, moves: tuple[Move, ...]) -> View:
    """`view`, whose owner is passed on, after moves without communication."""
    for move in moves:
        view = LOCAL_MOVES[move.collective](allocator, view, move)
    return view


def _communicated(
    allocator: Allocator, x: View, move: Move, ranks: int, backend: BackendSpec
) -> View:
    """The result of a collective that is waited for at once: `x` is there until it is done."""
    if not x.contiguous:
        x = _copied(allocator, x)
    part = Part("", "", x.shape, (), move, after_transfer(x.shape, move), x.dtype)
    allocator.own(x.block)
    sent = SentTensors((part,), (x,), ranks, own=False, receives_terms=backend.receives_terms)
    (found,) = started(allocator, move.collective, sent)()
    allocator.drop(x.block)
    allocator.becomes(found.block, Use.WORKSPACE)
    return View(found.block, found.shape, found.strides, x.dtype, x.grad)


def _slice(allocator: Allocator, x: View, move: Move) -> View:
    shape = (*x.shape[: move.dst], move.length, *x.shape[move.dst + 1 :])
    if move.halves:
        return _copied(allocator, View(x.block, shape, x.strides, x.dtype, x.grad))
    return View(x.block, shape, x.strides, x.dtype, x.grad)


def _mask(allocator: Allocator, x: View, move: Move) -> View:
    return x if move.keeps else _copied(allocator, x)


def _embed(allocator: Allocator, x: View, move: Move) -> View:
    size = prod(move.whole) * ITEM_BYTES[x.dtype]
    new = allocator.new(size, Use.WORKSPACE, module_of=x.block)
    allocator.drop(x.block)
    return View(new, move.whole, contiguous_strides(move.whole), x.dtype, x.grad)


LOCAL_MOVES = ByKind[Callable[[Allocator, View, Move], View]](
    "without communication whose memory is known",
    {Collective.SLICE: _slice, Collective.MASK: _mask, Collective.EMBED: _embed},
    LOCAL,
)


def _copied(allocator: Allocator, x: View) -> View:
    """A contiguous copy, in the place of `x`."""
    new = allocator.new(x.bytes, module_of=x.block)
    allocator.drop(x.block)
    return View(new, x.shape, contiguous_strides(x.shape), x.dtype, x.grad)
