from dataclasses import replace

from shardwright.planner.space.checkpoint_segments import checkpoint_segments
from shardwright.planner.space.repeats import shorten
from tests.harness.layered_graphs import INNER, residual_layers


def test_every_copy_of_a_repeated_layer_is_a_piece():
    short = shorten(residual_layers(7))
    (repeat,) = short.repeats
    found = checkpoint_segments(short.graph, short.repeats)
    assert [repeat.copy(i) for i in range(3)] == [p for p in found if p.start >= repeat.start]


def test_a_layer_of_two_residual_branches_has_two_parts():
    graph = residual_layers(10, inner=lambda layer: INNER // (1 + layer % 2))
    (repeat,) = shorten(graph).whole
    whole = checkpoint_segments(graph, (repeat,))
    parts = checkpoint_segments(graph, (repeat,), parts=True)
    layers = list(repeat.every_layer())
    assert len(layers) == 5 and set(layers) <= set(whole)
    assert [one for one in parts if one.start >= repeat.start] == [
        range(start, start + 7) for start in range(repeat.start, repeat.end, 7)
    ]
    assert all(graph.ops[part.stop - 1].name.endswith("sum") for part in parts)


def test_what_does_not_repeat_is_cut_where_one_value_crosses():
    graph = residual_layers(4)
    found = checkpoint_segments(graph, ())
    assert len(found) > 2
    assert [piece.start for piece in found[1:]] == [piece.stop for piece in found[:-1]]
    crossing = [f"layers.{i}.sum" for i in range(4)] + ["first"]
    assert all(graph.ops[piece.stop - 1].name in crossing for piece in found)
    assert found[-1].stop < len(graph.ops)  # the last would be run again at once


def test_operators_before_the_first_activation_do_not_hide_the_cuts_behind_them():
    graph = residual_layers(4)
    position = replace(
        graph.ops[0],
        name="position",
        target="aten.arange.start",
        args=(0, 4),
        outputs=("position",),
    )
    value = replace(graph.tensor["first"], name="position", requires_grad=False)
    later = replace(graph, ops=(position, *graph.ops), values=(*graph.values, value))
    found = checkpoint_segments(graph, ())
    assert len(found) > 2
    assert [range(piece.start + 1, piece.stop + 1) for piece in found[1:]] == list(
        checkpoint_segments(later, ())[1:]
    )
