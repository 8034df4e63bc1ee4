"""Memory of parameters that are loaded into a program, and of their gradients.

It follows `runtime.loading`.
"""

from __future__ import annotations

from functools import partial

from shardwright.ir.op_memory import contiguous_strides
from shardwright.program.instructions import Fetch, Load, Redistribute, Reduce, Shape
from shardwright.simulate.memory.allocator import Block, Use
from shardwright.simulate.memory.tape import Tape
from shardwright.simulate.memory.values import View


def load(walk: Tape, one: Load) -> None:
    """A view of a parameter."""
    leaf = walk.views[one.leaf]
    _alias(walk, one.result, one.shape, leaf)
    if leaf.grad:
        walk.node("parameters", (one.result,), lambda: _passed_on(walk, one.result, one.leaf))


def fetch(walk: Tape, one: Fetch) -> None:
    """Views of parameters; their gradients come home together."""
    for part in one.parts:
        _alias(walk, part.result, part.shape, walk.views[part.leaf])
    trained = []
    for part, copied in zip(one.parts, one.copied, strict=True):
        leaf = walk.views[part.leaf]
        if leaf.grad and walk.plain and (not copied or leaf.shape == part.shape):
            # Without a DTensor each gradient comes home as soon as it is known.
            walk.once_read(part.result, partial(_home, walk, part.result, part.leaf, copied))
        elif leaf.grad:
            trained.append((part, copied))

    def back() -> None:
        for summed in walk.works.pop(one.works, ()):
            walk.heap.drop(summed)
        home, given = [], []
        for part, copied in trained:
            gradient = walk.taken(part.result)
            if gradient is None:
                continue
            shape = walk.views[part.leaf].shape
            same = View(gradient.block, shape, contiguous_strides(shape), gradient.dtype)
            if gradient.contiguous and not copied:
                home.append((part.leaf, same))
                continue
            block = walk.heap.new(gradient.bytes, like=walk.views[part.leaf].block)
            new = View(block, shape, same.strides, gradient.dtype)
            home.append((part.leaf, new))
            given.append(gradient.block)
        for block in given:
            walk.heap.drop(block)
        for leaf, gradient in home:
            walk.give(leaf, gradient)

    walk.node("parameters", tuple(part.result for part, _ in trained), back)


def reduce(walk: Tape, one: Reduce) -> None:
    """Parameters as they are; their gradients are summed in one buffer."""
    for part in one.parts:
        _alias(walk, part.result, part.after, walk.views[part.value])

    def back() -> None:
        came: dict[str, list[tuple[Redistribute, View, bool]]] = {}  # by dtype
        for part, copied in zip(one.parts, one.copied, strict=True):
            if (gradient := walk.taken(part.result)) is not None:
                came.setdefault(gradient.dtype, []).append((part, gradient, copied))
        spent: list[Block] = []
        for dtype, parts in came.items():
            first = parts[0][1]
            if len(parts) == 1 and first.contiguous and not parts[0][2]:
                buffer = walk.heap.own(first.block)  # summed where it is
            else:
                if len(parts) > 1:
                    turned = [g for _, g, _ in parts if not g.contiguous]
                    spent += [walk.heap.new(g.bytes, like=g.block) for g in turned]
                buffer = walk.heap.new(sum(g.bytes for _, g, _ in parts), Use.COMMUNICATION)
            for part, gradient, _ in parts:
                strides = contiguous_strides(part.before)
                walk.heap.own(buffer)
                walk.give(part.value, View(buffer, part.before, strides, dtype))
                spent.append(gradient.block)
            walk.heap.drop(buffer)
        for block in spent:
            walk.heap.drop(block)

    walk.node("sums of gradients", tuple(part.result for part in one.parts), back)


def _alias(walk: Tape, result: str, shape: Shape, source: View) -> None:
    walk.heap.own(source.block)
    strides = contiguous_strides(shape)
    walk.views[result] = View(source.block, shape, strides, source.dtype, source.grad)


def _home(walk: Tape, result: str, leaf: str, copied: bool) -> None:
    gradient = walk.taken(result)
    if gradient is None:
        return
    shape, block = walk.views[leaf].shape, gradient.block
    shared = copied and block.owners > 1
    if shared or not gradient.contiguous:
        new = walk.heap.new(gradient.bytes)
        walk.heap.drop(block)
        block = new
    walk.give(leaf, View(block, shape, contiguous_strides(shape), gradient.dtype))


def _passed_on(walk: Tape, result: str, to: str) -> None:
    gradient = walk.taken(result)
    if gradient is not None:
        walk.give(to, gradient)
