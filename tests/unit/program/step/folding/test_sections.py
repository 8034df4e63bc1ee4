"""The places where layers begin, by which a program is cut."""

import pytest

from shardwright.program.step.folding.sections import Layer, _boundaries


@pytest.mark.parametrize(
    "order, bounded",
    [
        ((-2, -1, 0, 1), True),
        ((-1, 0, 1), True),
        ((-2, -1, 0), False),  # the layer behind the gap has no end
        ((1, 0, -1, -2), True),
        ((0, -1, -2), True),
        ((1, 0, -1), False),
        ((-1, 1, 0), False),
        ((0, 1), False),
    ],
)
def test_layers_around_a_gap_begin_in_order_and_the_last_of_them_ends(order, bounded):
    given = [(Layer(0, number, "op"), 10 * at) for at, number in enumerate(order)]
    found = {number: 10 * at for at, number in enumerate(order)}
    assert _boundaries(given) == (found if bounded else None)


def test_the_first_instruction_that_each_layer_has_once_is_taken():
    once = [(Layer(0, number, "b"), 10 * number) for number in (-1, 0, 1)]
    twice = [(Layer(0, number, "a"), 10 * number + at) for number in (-1, 0, 1) for at in (1, 2)]
    assert _boundaries([*twice, *once]) == {-1: -10, 0: 0, 1: 10}
