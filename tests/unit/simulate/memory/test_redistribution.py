"""Memory of redistributions on the ranks."""

import pytest

from shardwright.ir.layout import Layout, Mesh, local_atoms
from shardwright.ir.op_memory import contiguous_strides
from shardwright.machine.backends import BACKENDS
from shardwright.program.instructions import flat, moves
from shardwright.simulate.memory.allocator import Allocator
from shardwright.simulate.memory.redistribution import moved
from shardwright.simulate.memory.values import View

MESH = Mesh.parse("a=8")
ATOMS = ((64,), (16,))
WHOLE = 64 * 16 * 4  # bytes


# Tiles at the peak: what was there, what comes, and first what is sent, then the result in order.
@pytest.mark.parametrize("src, dst", [("a:S(0)", "a:S(1)"), ("a:S(1)", "a:S(0)")])
def test_to_cut_another_dimension_does_not_need_the_whole(src, dst):
    before, after = Layout.parse(src, MESH), Layout.parse(dst, MESH)
    shape = flat(local_atoms(ATOMS, before, (0,)))
    heap = Allocator()
    block = heap.new(WHOLE // 8)
    view = View(block, shape, contiguous_strides(shape), "float32")
    steps, made = moves(ATOMS, before, after, (0,)), flat(local_atoms(ATOMS, after, (0,)))
    found = moved(heap, view, steps, shape, made, {"a": 8}, BACKENDS["gloo"])
    assert found.bytes == found.block.bytes == WHOLE // 8
    assert heap.peak == 3 * WHOLE // 8
