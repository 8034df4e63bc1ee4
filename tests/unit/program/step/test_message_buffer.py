"""Values of a message lie one after the other in its buffer."""

from shardwright.program.step.instructions import Payload
from shardwright.program.step.message_buffer import ALIGNMENT, buffer_layout


def test_each_of_several_values_is_aligned():
    shapes = ((3,), (), (5, 7), (0, 4))
    found = buffer_layout([Payload("x", shape, "bfloat16") for shape in shapes])
    assert found.sizes == (6, 2, 70, 0)
    assert found.starts == (0, 64, 128, 256)
    assert all(start % ALIGNMENT == 0 for start in found.starts)
    assert found.bytes == 256


def test_a_value_that_is_alone_is_not_padded():
    assert buffer_layout([Payload("x", (3,), "int64")]) == ((0,), (24,), 24)


def test_no_message_is_empty():
    assert buffer_layout([]).bytes == 1
    assert buffer_layout([Payload("x", (0,), "float32")]).bytes == 1
