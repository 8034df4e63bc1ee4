"""Memory of messages while they are sent, and of what they bring."""

import pytest

from shardwright.program.step.instructions import Payload, Recv, Send
from shardwright.simulate.memory.allocator import Allocator, Use
from shardwright.simulate.memory.step.messages import receiving, sending
from shardwright.simulate.memory.values import View

ONE, ODD = Payload("x", (4, 8), "float32"), Payload("y", (3,), "float32")


@pytest.mark.parametrize(
    "payload, strides, more",
    [
        ((ONE,), (8, 1), 0),  # from its own memory
        ((ONE,), (1, 4), 128),  # it is copied to be in order
        ((ONE, ODD), (8, 1), 128 + 64),
        ((Payload("missing", (4, 8), "float32"),), (8, 1), 128),  # zeros
        ((), (8, 1), 1),
    ],
)
def test_a_message_is_sent_from_its_value_or_from_a_buffer(payload, strides, more):
    heap = Allocator()
    values = {"x": View(heap.new(128), (4, 8), strides, "float32")}
    values["y"] = View(heap.new(12), (3,), (1,), "float32")
    before = heap.total
    sent = sending(heap, Send(payload, "pp", "send"), values)
    assert heap.total == before + more
    heap.drop(values["x"].block)
    assert heap.total == before + more - (0 if payload == (ONE,) and not more else 128)
    assert sent() == [] and heap.total == 12


def test_values_of_one_message_share_what_they_came_in():
    heap = Allocator()
    results = receiving(heap, Recv((ONE, ODD), "pp", "recv"))
    assert heap.total == 128 + 64
    first, second = results()
    assert (first.shape, first.strides, second.shape) == ((4, 8), (8, 1), (3,))
    assert first.block is second.block and first.block.use is Use.WORKSPACE
    heap.drop(first.block)
    assert heap.total == 192
    heap.drop(second.block)
    assert heap.total == 0
