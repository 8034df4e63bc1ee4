"""Kinds of collectives: every layer knows each, and gradients take the transpose."""

import numpy as np
import pytest

from shardwright.ir.layout import Layout, Mesh, Partial, Replicate, Shard
from shardwright.ir.redistribution import (
    COLLECTIVES,
    LOCAL,
    MOVING,
    SWAPS,
    ByKind,
    Collective,
    Exchange,
    communication_named,
    steps_between,
)
from shardwright.runtime.comm import collectives as run
from shardwright.runtime.comm import local_moves
from shardwright.simulate.costs import collectives as costs
from shardwright.simulate.memory import collectives as memory
from shardwright.simulate.memory import redistribution

DEVICES, TILE = 2, 3
EVERY = (*COLLECTIVES, *Exchange)
WHOLE = DEVICES * TILE


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_layer_knows_every_kind(kind):
    assert callable(costs.PRICES[kind])
    assert callable((memory.TRANSFERS if kind.moves_data else redistribution.LOCAL_MOVES)[kind])
    assert callable((run.STARTS if kind.moves_data else local_moves.LOCAL_MOVES)[kind])
    assert (kind in MOVING) != (kind in LOCAL)


@pytest.mark.parametrize("kind", Exchange)
def test_exchanges_have_a_price_and_those_inside_of_operators_a_memory(kind):
    assert callable(costs.PRICES[kind]) and kind.gradient is kind
    with pytest.raises(ValueError, match="is no communication whose memory is known"):
        memory.TRANSFERS[kind]
    if kind is Exchange.MESSAGE:
        with pytest.raises(ValueError, match="is no communication inside of one operator"):
            memory.exchange_bytes(kind, 1, 2)
    else:
        assert memory.exchange_bytes(kind, 3, 4) == 7


def test_a_kind_that_a_layer_forgets_or_does_not_know_is_an_error():
    with pytest.raises(ValueError, match="with a colour, slice is missing"):
        ByKind("with a colour", {kind: 1 for kind in EVERY if kind.value != "slice"})
    with pytest.raises(ValueError, match="with a colour, mask is missing or must not be there"):
        ByKind("with a colour", dict.fromkeys([*MOVING, Collective.MASK], 1), MOVING)
    with pytest.raises(ValueError, match="broadcast is no communication with a colour"):
        ByKind("with a colour", dict.fromkeys(EVERY, 1))["broadcast"]


def test_names_in_plans_are_those_of_known_kinds():
    assert communication_named("all_gather") is Collective.ALL_GATHER
    assert communication_named("ring") is Exchange.RING
    with pytest.raises(ValueError, match="'broadcast' is no collective; known are slice"):
        communication_named("broadcast")


def matrix(kind):
    """What a step makes of the tiles of all devices, one after the other.

    They are tiles of a vector, in an all-to-all of a square with one number for each pair of them.
    """
    one = np.eye(WHOLE)
    cut = [one[d * TILE : (d + 1) * TILE] for d in range(DEVICES)]  # whole -> tile of device d
    match kind:
        case Collective.ALL_REDUCE:
            blocks = [[one] * DEVICES] * DEVICES
        case Collective.REDUCE_SCATTER:
            blocks = [[cut[to]] * DEVICES for to in range(DEVICES)]
        case Collective.ALL_GATHER:
            blocks = [[cut[of].T for of in range(DEVICES)]] * DEVICES
        case Collective.ALL_TO_ALL:
            tiles = np.eye(DEVICES)  # device a sends part b to device b, where it is part a
            return np.einsum("ad,bc->abcd", tiles, tiles).reshape(DEVICES**2, DEVICES**2)
        case _:
            shape = {Collective.SLICE: cut, Collective.EMBED: [c.T for c in cut]}
            first = [one, np.zeros_like(one)]
            diagonal = shape.get(kind, first)
            blocks = [
                [part if i == j else np.zeros_like(part) for j in range(DEVICES)]
                for i, part in enumerate(diagonal)
            ]
    return np.block(blocks)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_gradients_take_the_transpose(kind):
    assert np.array_equal(matrix(kind).T, matrix(kind.gradient))
    assert kind.gradient.gradient is kind
    assert kind.gradient.moves_data == kind.moves_data


def test_changes_of_placement_name_one_kind_each():
    assert Collective.ALL_GATHER.change == (Shard, Replicate)
    assert Collective.REDUCE_SCATTER.change == (Partial, Shard)
    others = [kind for kind in COLLECTIVES if kind not in SWAPS]  # which are told by the order
    assert len({kind.change for kind in others}) == len(others)


def test_the_outer_axis_moves_parts_of_what_the_inner_one_moves():
    """Links along the outer axis are slower, as they join hosts."""
    mesh = Mesh.parse("dp=8 cp=4")
    stored, whole, terms = (
        Layout.parse(text, mesh) for text in ("dp:S(0) cp:S(1)", "dp:R cp:R", "dp:P cp:P")
    )
    assert [step.axis for step in steps_between(stored, whole)] == [0, 1]
    assert [step.axis for step in steps_between(terms, stored)] == [1, 0]
    one_dimension = Layout.parse("dp:S(0) cp:S(0)", mesh)
    assert [step.axis for step in steps_between(one_dimension, whole)] == [1, 0]
