from dataclasses import replace

import pytest

from shardwright.ir.graph import verify
from shardwright.planner.space.checkpoint_segments import checkpoint_segments
from shardwright.planner.space.repeats import Repeat, find_repeats, grouped, shorten
from shardwright.planner.strategies.layers import layers_of
from shardwright.rules.analysis import analyze
from tests.harness.layered_graphs import residual_layers


def test_equal_layers_are_a_repeat_that_is_cut_where_one_value_crosses():
    (repeat,) = find_repeats(residual_layers(7))
    assert (repeat.period, repeat.count) == (7, 7)
    assert repeat.start == 1 and repeat.copy(1) == range(8, 15)


def test_the_short_graph_has_three_copies_and_stands_for_all():
    graph = residual_layers(7)
    short = shorten(graph)
    verify(short.graph)
    assert short.repeats == (Repeat(1, 7, 3),) and short.skipped == (4,)
    left_out = {op.name for op in graph.ops} - {op.name for op in short.graph.ops}
    assert {short.stands_for[name] for name in left_out} == {
        op.name for op in short.graph.ops if op.name.startswith("layers.1.")
    }
    assert short.stands_for["layers.4.left.weight"] == "layers.1.left.weight"
    assert [count for count in short.counts if count > 1] == [1 + 4] * 7
    assert sum(short.counts) == len(graph.ops)
    assert short.copy_of["layers.2.down"] == (0, 0) and short.copy_of["layers.5.down"] == (0, 3)


def test_a_short_graph_has_the_dimensions_of_the_whole():
    graph = residual_layers(7)
    whole, short = analyze(graph), analyze(shorten(graph).graph)
    assert short.atoms == {name: whole.atoms[name] for name in short.atoms}
    assert {n: str(r) for n, r in short.rules.items()} == {
        n: str(whole.rules[n]) for n in short.rules
    }


@pytest.mark.parametrize(
    "graph",
    [
        residual_layers(4),  # too few to leave any out
        residual_layers(9, inner=lambda layer: 64 + 8 * layer),  # no two of them equal
    ],
)
def test_what_does_not_repeat_is_left_as_it_is(graph):
    assert shorten(graph).graph is graph


def test_two_sizes_of_layers_are_two_repeats():
    short = shorten(residual_layers(12, inner=lambda layer: 64 if layer < 6 else 96))
    assert [repeat.count for repeat in short.repeats] == [3, 3] and short.skipped == (3, 3)
    verify(short.graph)


def test_layers_that_read_two_masks_by_turns_repeat_in_pairs():
    graph = residual_layers(13, masks=2)
    (repeat,) = find_repeats(graph)
    assert (repeat.period, repeat.count, repeat.layers) == (16, 6, 2)
    layers = layers_of(graph, (repeat,))
    assert layers == tuple(range(s, s + 8) for s in range(repeat.start, repeat.end, 8))
    assert set(layers) < set(checkpoint_segments(graph, (repeat,)))
    short = shorten(graph)
    verify(short.graph)
    assert short.skipped == (3,)
    assert not list(find_repeats(residual_layers(9, masks=2)))  # four pairs are too few
    deep = residual_layers(30, masks=2)
    (threes,) = shorten(deep, grouped(deep, 3)).repeats  # three layers end with every third pair
    assert (threes.period, threes.layers) == (48, 6)


def test_a_tied_weight_belongs_to_no_copy():
    short = shorten(residual_layers(7, tied=True))
    assert short.skipped == (4,)
    assert "scale" not in short.stands_for


def test_draws_repeat_though_each_has_a_number_of_its_own():
    graph = residual_layers(7)
    ops = [
        replace(op, target="shardwright.dropout.default", args=(*op.args, 0.1, number))
        if op.kind == "relu"
        else op
        for number, op in enumerate(graph.ops)
    ]
    assert len(list(find_repeats(replace(graph, ops=tuple(ops))))) == 1
