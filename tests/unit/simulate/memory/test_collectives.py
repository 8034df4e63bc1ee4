"""Memory that a collective takes when it starts."""

import pytest

from shardwright.ir.redistribution import Collective
from shardwright.simulate.memory.allocator import Allocator
from shardwright.simulate.memory.collectives import SentTensors, started
from shardwright.simulate.memory.values import View

IN_ORDER, TURNED = (8, 1), (1, 4)


@pytest.mark.parametrize(
    "strides, own, peak",
    [
        ([IN_ORDER], True, 128),  # it is reduced in place
        ([IN_ORDER], False, 256),  # someone else reads it
        ([TURNED], True, 256),
        ([TURNED], False, 256),
        ([IN_ORDER, IN_ORDER], True, 512),
    ],
)
def test_one_tensor_of_its_own_is_reduced_in_place_and_others_in_a_copy(strides, own, peak):
    heap = Allocator()
    views = [View(heap.new(128), (4, 8), one, "float32") for one in strides]
    readers = [] if own else [heap.own(view.block) for view in views]
    started(heap, Collective.ALL_REDUCE, SentTensors((), views, 2, own, False))
    assert heap.peak == peak
    for block in readers:
        heap.drop(block)
    assert heap.total == 128 * len(views), "what is reduced alone is left"
