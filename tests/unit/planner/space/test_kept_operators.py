"""Operators that the search may keep inside of recomputed segments, and what each costs."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.space.assembly import FREE, SEARCHED, SEARCHED_EXACTLY
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.tables.layout_codes import SUMS, digits
from shardwright.solve.frontier.fast import Effort, fast_frontier
from tests.harness import models
from tests.harness.layered_graphs import BATCH, INNER, WIDTH, Writer, residual_layers

MACHINE = preset("2xH100")


@pytest.fixture(scope="module")
def graph():
    model, batch = models.small_llama(layers=5, hidden=32, heads=4, rows=8, length=8)
    return sw.capture(model, (), batch)


def space_of(graph, skeleton=SEARCHED, mesh="dp=2"):
    factory = SpaceFactory(graph, recompute=True)
    return factory.space(MACHINE, Mesh.parse(mesh), "adamw", 1, skeleton=skeleton)


def all_kept(space, names):
    """The assignment in which every segment is recomputed, except the operators of these names."""
    options = dict.fromkeys(space.op_nodes, 0)
    storage = dict.fromkeys((leaf.name for leaf in space.parameters), 0)
    return space.assignment(options, storage, True, names)


def test_products_and_attention_may_be_kept_and_the_last_product_takes_no_memory(graph):
    space, _ = space_of(graph)
    kinds = [one.op.kind for one in space.kept_operators]
    assert len(kinds) % 3 == 0  # layers of the short graph
    assert kinds[: len(kinds) // 3].count("linear") == 7
    assert kinds[: len(kinds) // 3].count("scaled_dot_product_attention") == 1
    for one in space.kept_operators:
        free = one.op.source.module.endswith("down_proj")  # only the residual sum reads it
        assert (one.bytes == 0).all() == free
        assert (one.choice.time[:, 0] > 0).all()


def chained_layers(count):
    """Layers x + down(tanh(3 up(x)^2) * relu(up(x))); the power saves what it reads."""
    w = Writer()
    x = w.linear("first", w.leaf("x", LeafKind.INPUT, BATCH, WIDTH), BATCH, WIDTH)
    for i in range(count):
        at, size = f"layers.{i}", (BATCH, INNER)
        up = w.linear(f"{at}.up", x, *size)
        power = w.call(f"{at}.power", "pow.Tensor_Scalar", size, up, 2, saves=(up,))
        scaled = w.call(f"{at}.scaled", "mul.Tensor", size, power, 3.0)
        soft = w.call(f"{at}.soft", "tanh.default", size, scaled, saves=(f"{at}.soft",))
        hard = w.call(f"{at}.hard", "relu.default", size, up, saves=(f"{at}.hard",))
        both = w.call(f"{at}.both", "mul.Tensor", size, soft, hard, saves=(soft, hard))
        down = w.linear(f"{at}.down", both, BATCH, WIDTH)
        copy = w.call(f"{at}.copy", "clone.default", (BATCH, WIDTH), down)
        x = w.call(f"{at}.sum", "add.Tensor", (BATCH, WIDTH), x, copy)
    last = w.linear("last", x, BATCH, WIDTH)
    return w.graph(w.call("loss", "sum.default", (), last))


def test_chains_are_kept_as_a_whole_for_the_bytes_of_their_last_result():
    """What makes a saved value by one operator, and what two operators read, is no chain."""
    graph = chained_layers(5)
    space, _ = space_of(graph, SEARCHED_EXACTLY, mesh="dp=1")
    chains = [one for one in space.kept_operators if one.op.kind != "linear"]
    assert len(chains) == 3  # layers of the short graph
    for one in chains:
        layer = one.op.source.module
        assert one.ops == {f"{layer}.power", f"{layer}.scaled", f"{layer}.soft"}
        assert one.bytes.tolist() == [graph.tensor[one.op.name].bytes]
        costs = [space.model.operator(graph.op[name]).seconds[0] for name in one.ops]
        backward = [space.model.backward_seconds(graph.op[name])[0] for name in one.ops]
        assert one.choice.time[0, 0] == pytest.approx(sum(costs) - sum(backward))
        assert one.choice.time is chains[0].choice.time  # by which layers are recognised
    named, _ = space_of(graph, replace(SEARCHED_EXACTLY, kept=chains[0].ops), mesh="dp=1")
    (same,) = named.kept_operators
    assert same.ops == chains[0].ops and same.bytes.tolist() == chains[0].bytes.tolist()
    part, _ = space_of(
        graph, replace(SEARCHED_EXACTLY, kept=frozenset({chains[0].op.name})), mesh="dp=1"
    )
    assert [one.ops for one in part.kept_operators] == [{chains[0].op.name}]


def test_the_last_product_is_kept_for_nothing_with_its_copy():
    """No operator that runs again reads the copy, which only the residual sum needs."""
    space, _ = space_of(chained_layers(5), mesh="dp=1")
    ends = [one for one in space.kept_operators if one.op.name.endswith("down")]
    assert len(ends) == 3  # layers of the short graph
    for one in ends:
        assert one.ops == {one.op.name, f"{one.op.source.module}.copy"}
        assert one.bytes.tolist() == [0] and one.choice.time[0, 0] > 0


def test_readers_of_one_layout_share_a_reading(graph):
    """Projections of one value do, and no reader does alone."""
    space, _ = space_of(graph)
    kinds = [[op.source.module.rpartition(".")[2] for op in one.readers] for one in space.readings]
    assert ["q_proj", "k_proj", "v_proj"] in kinds and ["gate_proj", "up_proj"] in kinds
    for one in space.readings:
        assert len(one.readers) > 1
        assert all(one.value in op.operands for op in one.readers)


def test_no_partial_sum_is_kept_that_operators_read_again(graph):
    """Tables would count the sum twice. Only the attention's projection is read again."""
    space, _ = space_of(graph, mesh="tp=2")
    barred = 0
    for one in space.kept_operators:
        options = space.model.options(one.op)
        chosen = options.results[0, space.op_nodes[one.op.name].options]
        sums = (digits(chosen, 1) == SUMS).any(axis=1)
        again = not one.op.source.module.endswith("down_proj")
        assert np.isinf(one.choice.time[:, 1]).tolist() == (sums & again).tolist()
        barred += (sums & again).sum()
    assert barred


@pytest.mark.parametrize("chained", [False, True])
def test_every_set_of_kept_operators_costs_what_the_parts_of_its_plan_cost(graph, chained):
    graph = chained_layers(5) if chained else graph
    space, short = space_of(graph, SEARCHED_EXACTLY if chained else SEARCHED)
    builder = PlanBuilder(space, graph, short, "adamw")
    count = len(space.kept_operators) // 3  # of a layer, of three in the short graph
    layers = [[one.op for one in space.kept_operators[i::count]] for i in range(count)]
    base = space.prices.point(space.folded.expand(all_kept(space, ())))
    for size in (0, 1, 2, count):
        for alike in combinations(layers, size):
            names = {op.name for ops in alike for op in ops}
            point = space.prices.point(space.folded.expand(all_kept(space, names)))
            plan = builder.plan(point, 0, 0.0, "kept", ())
            parts = [*plan.ops, *plan.transfers, *plan.parameters]
            assert plan.step_seconds == pytest.approx(sum(p.seconds for p in parts), rel=1e-9)
            kept = {op.name for op in plan.ops if op.kept}
            recomputed = {op.name for op in plan.ops if op.runs_again}
            assert kept >= names and not kept & recomputed
            saved = sum(op.saved_bytes for op in plan.ops if op.kept)
            assert saved == point.memory - base.memory
            assert point.time < base.time or not names


def test_a_kept_choice_of_the_search_costs_what_the_strategy_with_these_operators_costs(graph):
    """Both on one device, where all plans have the same tilings."""
    space, _ = space_of(graph, mesh="dp=1")
    kept = [one.op.name for one in space.kept_operators if one.op.kind == "linear"]
    mine = space.prices.point(space.folded.expand(all_kept(space, kept)))
    expansion = Expansion(graph, preset("1xH100"), "adamw")
    named = expansion.expanded(Strategy.parse("ac=ops(mm)")).point
    assert mine.memory == named.memory
    assert mine.time == pytest.approx(named.time, rel=1e-9)


def test_a_search_that_may_keep_operators_is_never_worse():
    graph = residual_layers(7)
    found = {}
    for name, skeleton in (("layers", FREE), ("operators", SEARCHED)):
        space, _ = space_of(graph, skeleton)
        effort = Effort(max_weights=40, max_points=64)
        found[name] = fast_frontier(space.folded, effort, solver=space.solver, prices=space.prices)
    points = found["layers"].points
    better = 0
    for point in points:
        seconds = [p.time for p in found["operators"].points if p.memory <= point.memory]
        assert min(seconds) <= point.time * (1 + 1e-3)
        assert found["operators"].lower_bound(point.memory) <= min(seconds) * (1 + 1e-9)
        better += min(seconds) < 0.99 * point.time
    assert better
