from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.graph import LeafKind
from shardwright.ir.options.numerics import Numerics
from shardwright.planner.tables.memory import (
    fixed_bytes,
    kept_bytes,
    retention,
    state_bytes,
    workspace_bytes,
)
from shardwright.simulate.costs.workload import workload
from tests.harness.small_graphs import MM, RELU, build, linear_layer, op, rule

INPUT, PARAMETER, BUFFER = LeafKind.INPUT, LeafKind.PARAMETER, LeafKind.BUFFER
SAME = rule("m n -> m n", m=8, n=32)
LEAVES = {"x": (INPUT, ((8,), (16,))), "w": (PARAMETER, ((16,), (32,)))}


def layer(*ops, aliases=None):
    """The layer y = x @ w followed by `ops`."""
    graph, _ = build(LEAVES, [op("y", "mm", ["x", "w"], MM), *ops], aliases=aliases)
    return retention(graph)


def test_a_result_that_its_operator_saves_stays_with_it():
    found = layer(op("z", "relu", ["y"], RELU, saves=("z",)))
    assert found.at_producer == {"z"}
    assert not found.at_edge and not found.copies


def test_what_nobody_saves_is_not_kept():
    found = layer(op("z", "neg", ["y"], SAME))
    assert not found.at_producer and not found.at_edge and not found.copies


def test_a_value_with_one_saver_is_kept_as_that_saver_sees_it():
    found = layer(op("z", "log", ["y"], SAME, saves=("y",)), op("u", "neg", ["y"], SAME))
    assert found.at_edge == {("y", "z")}
    assert not found.at_producer and not found.copies


def test_a_value_with_two_savers_stays_with_its_producer_and_each_moved_copy_is_kept():
    found = layer(
        op("z", "log", ["y"], SAME, saves=("y",)),
        op("u", "exp", ["y"], SAME, saves=("y",)),
        op("v", "neg", ["y"], SAME),
    )
    assert found.at_producer == {"y"}
    assert found.copies == {("y", "z"), ("y", "u")}


def test_a_view_that_is_saved_keeps_the_value_behind_it():
    flat = rule("m n -> (m n)", m=8, n=32)
    part = rule("a -> b", whole="a b", a=256, b=64)
    found = layer(
        op("f", "view", ["y"], flat),
        op("p", "slice", ["f"], part),
        op("z", "log", ["p"], rule("a -> a", a=64), saves=("p",)),
        aliases={"f": "y", "p": "f"},
    )
    assert found.at_producer == {"y"}  # all of it, for a part is saved
    assert found.copies == {("y", "f"), ("f", "p"), ("p", "z")}


def test_a_view_of_everything_with_one_saver_is_kept_as_the_saver_sees_it():
    found = layer(
        op("f", "view", ["y"], rule("m n -> (m n)", m=8, n=32)),
        op("z", "log", ["f"], rule("a -> a", a=256), saves=("f",)),
        aliases={"f": "y"},
    )
    assert found.at_edge == {("f", "z")}
    assert not found.at_producer and not found.copies


def test_a_parameter_pays_nothing_more_than_its_moved_copies():
    graph, _ = build(
        LEAVES,
        [
            op("t", "t", ["w"], rule("k n -> n k", k=16, n=32)),
            op("y", "linear", ["x", "t"], rule("m k, n k -> m n", m=8, k=16, n=32), saves=("t",)),
        ],
        aliases={"t": "w"},
    )
    found = retention(graph)
    assert not found.at_producer and not found.at_edge
    assert found.copies == {("w", "t"), ("t", "y")}


def test_an_operator_keeps_its_results_and_a_local_part_of_what_it_saves_besides():
    graph, analysis = linear_layer()
    work = workload(graph.ops[1], analysis.rules["z"], graph)
    sizes = np.array([[8, 4, 3], [32, 32, 32]])
    assert kept_bytes(work, (True,), 0, sizes).tolist() == [1024, 512, 384]
    assert kept_bytes(work, (True,), 10, sizes).tolist() == [1024 + 10, 512 + 5, 384 + 4]
    assert kept_bytes(work, (False,), 10, sizes).tolist() == [10, 5, 4]  # 3.75, rounded up
    assert kept_bytes(work, (False,), 0, sizes).tolist() == [0, 0, 0]


def test_a_workspace_holds_operands_results_and_gradients():
    graph, analysis = linear_layer()
    work = workload(graph.ops[0], analysis.rules["y"], graph)
    sizes = np.array(work.sizes)[:, None]
    assert workspace_bytes(work, sizes).tolist() == [512 + 2 * 2048 + 2 * 1024]


@pytest.mark.parametrize("frozen, adamw, masters", [((), 4096, 9216), (("w",), 1024, 3072)])
def test_state_is_held_in_the_dtype_of_masters_besides_their_casts(frozen, adamw, masters):
    """512 elements in bfloat16: weight, gradient and two moments; masters take twice as much.

    To masters comes the cast that operators read, also of a frozen weight.
    """
    layers = [op("y", "mm", ["x", "w"], MM)]
    graph, _ = build(LEAVES, layers, frozen=frozen, dtype="bfloat16")
    assert state_bytes(graph, "adamw") == adamw
    assert state_bytes(replace(graph, numerics=Numerics(precision="bf16")), "adamw") == masters


def test_inputs_buffers_and_constants_lie_on_every_rank():
    graph, _ = build(
        LEAVES | {"mean": (BUFFER, ((32,),)), "mask": (LeafKind.CONSTANT, ((2,), (2,)))},
        [op("y", "mm", ["x", "w"], MM)],
    )
    assert fixed_bytes(graph) == 512 + 128 + 16
