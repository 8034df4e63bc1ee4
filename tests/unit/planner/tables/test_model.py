import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import REPLICATE, Layout, Mesh, Shard
from shardwright.ir.options.optimizers import OptimizerError
from shardwright.ir.plan import Phase
from shardwright.planner.communication.resharding import Want
from shardwright.planner.tables.layout_codes import encode
from shardwright.planner.tables.mesh_invariants import MeshInvariants
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed
from shardwright.planner.tables.pricing import Pricing
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import layouts_under
from shardwright.rules.rule import PassPartial, Split
from shardwright.tracing.capture import capture_call
from tests.harness.cost_queries import Asking
from tests.harness.small_graphs import MM, RELU, build, linear_layer, op, rule, toy_machine

ONE, TWO = Mesh.parse("dp=1"), Mesh.parse("dp=2")
INPUT, PARAMETER = LeafKind.INPUT, LeafKind.PARAMETER


def model(mesh=TWO, graph=None, optimizer="adamw", **machine):
    return Asking(*(graph or linear_layer()), toy_machine(**machine), mesh, Pricing(optimizer))


def saving():
    """The layer y = x @ w, of which w is kept."""
    leaves = {"x": (INPUT, ((8,), (16,))), "w": (PARAMETER, ((16,), (32,)))}
    return build(leaves, [op("y", "mm", ["x", "w"], MM, saves=("x", "w"))])


def axis(text):
    return Layout.parse(f"dp:{text}", TWO)


def test_meshes_that_share_what_no_mesh_changes_cost_what_they_cost_alone():
    graph, analysis = linear_layer()
    machine = toy_machine()
    meshless = MeshInvariants(graph, analysis, machine)
    for mesh in (ONE, TWO):
        shared = CostModel(graph, analysis, machine, mesh, meshless=meshless)
        alone = CostModel(graph, analysis, machine, mesh)
        for made in graph.ops:
            for again in ((), {made.name}):
                one, other = (costs.operator(made, again) for costs in (shared, alone))
                assert (one.seconds == other.seconds).all() and (one.bytes == other.bytes).all()


def test_models_with_other_names_and_choices_share_tables_and_cost_what_they_cost_alone():
    graph, analysis = linear_layer()
    given = graph, analysis, toy_machine()
    first = CostModel(*given, TWO)
    asked = list(tables(first))
    others = ((Mesh.parse("tp=2"), {}), (TWO, {graph.ops[0].name: (frozenset({0}),)}))
    for mesh, only in others:
        allowed = Allowed(only, {leaf.name: (frozenset({0}),) for leaf in graph.leaves if only})
        shared = list(tables(CostModel(*given, mesh, allowed=allowed, like=first)))
        alone = list(tables(CostModel(*given, mesh, allowed=allowed)))
        for one, other, known in zip(shared, alone, asked, strict=True):
            assert (one.seconds == other.seconds).all() and (one.bytes == other.bytes).all()
            assert only or one is known
        assert not only or any(
            one.seconds.shape != known.seconds.shape
            for one, known in zip(shared, asked, strict=True)
        )


def tables(costs):
    """The tables of all operators, parameters and edges of a model."""
    codes = {leaf.name: costs.storable(leaf) for leaf in costs.graph.leaves_of(PARAMETER)}
    for leaf in costs.graph.leaves_of(PARAMETER):
        yield costs.parameter(leaf, codes[leaf.name])
    for made in costs.graph.ops:
        yield costs.operator(made)
        for i, name in enumerate(made.operands):
            yield costs.edge(name, codes.get(name, np.zeros(1, np.int64)), made, [i])


def test_everything_replicated_on_one_device_costs_the_serial_sum_and_no_transfer():
    costs = model(ONE)
    whole = Layout.replicated(ONE)
    seconds = kept = 0.0
    for made in costs.graph.ops:
        table = costs.operator(made, [(None,)])
        seconds += table.seconds[0]
        kept += table.bytes[0]
        for i, name in enumerate(made.operands):
            edge = costs.edge(name, [whole], made, [i], [(None,)])
            assert edge.seconds == 0
            kept += edge.bytes[0, 0]
            assert costs.transfers(name, whole, made, [i], (None,)) == ()
    mm, relu, total = 18, 2 + 5 * 1024 / 4096, 2 + 2 * 1028 / 4096
    assert seconds == mm + relu + total
    assert kept == 1024  # relu's result; mm saves x, which is an input


def test_a_parameter_pays_for_gradient_state_and_update():
    costs = model()
    (leaf,) = costs.graph.leaves_of(PARAMETER)
    table = costs.parameter(leaf, [axis("R"), axis("S(1)")])
    assert table.bytes.tolist() == [4 * 2048, 4 * 1024]
    assert table.seconds.tolist() == [1 + 7 * 2048 / 4096, 1 + 7 * 1024 / 4096]
    assert model(optimizer="sgd").parameter(leaf, [axis("R")]).bytes.tolist() == [2 * 2048]


def test_a_frozen_parameter_is_only_its_weight():
    graph = build(
        {"x": (INPUT, ((8,), (16,))), "w": (PARAMETER, ((16,), (32,)))},
        [op("y", "mm", ["x", "w"], MM)],
        frozen=("w",),
    )
    costs = model(graph=graph)
    (leaf,) = costs.graph.leaves_of(PARAMETER)
    table = costs.parameter(leaf, [axis("R")])
    assert (table.seconds[0], table.bytes[0]) == (0, 2048)


def test_partial_sums_are_reduced_forward_and_their_gradient_is_free():
    costs = model()
    relu = costs.graph.ops[1]
    table = costs.edge("y", [axis("P"), axis("S(0)")], relu, [0], [(None,), (Split("m"),)])
    all_reduce = 2 + 2 * 1 + 1024 / 16
    reduce_scatter = 2 + 1 + 512 / 16
    all_gather, cut = 2 + 1 + 512 / 16, 1 + 1024 / 4096
    assert table.seconds.tolist() == [
        [all_reduce, reduce_scatter + all_gather],  # the scattered gradient is wanted whole
        [all_gather + cut, 0],
    ]


def test_data_parallel_reduces_the_gradient_of_a_replicated_weight():
    costs = model()
    mm = costs.graph.ops[0]
    table = costs.edge("w", [axis("R"), axis("S(0)")], mm, [1], [(Split("m"),)])
    all_reduce = 2 + 2 * 1 + 2048 / 16
    gather_and_scatter = 2 * (2 + 1 + 1024 / 16)  # alone in a bucket, without a copy
    assert table.seconds[:, 0].tolist() == [all_reduce, gather_and_scatter]
    backward = costs.transfers("w", axis("R"), mm, [1], (Split("m"),))
    assert [(t.phase, t.collectives, t.bytes) for t in backward] == [
        (Phase.BACKWARD, ("all_reduce dp",), 2048)
    ]


def test_gradients_of_micro_batches_are_summed_before_one_all_reduce():
    one, four = (
        Asking(*linear_layer(), toy_machine(), TWO, Pricing(micro_batches=count))
        for count in (1, 4)
    )
    found = [
        costs.edge("w", [axis("R")], costs.graph.ops[0], [1], [(Split("m"),)]).seconds
        for costs in (one, four)
    ]
    assert found[0] == found[1] == 2 + 2 * 1 + 2048 / 16


def test_a_copy_that_is_gathered_again_costs_a_gather_and_no_memory():
    costs = model(graph=saving())
    mm, layouts = costs.graph.ops[0], [axis("R"), axis("S(0)"), axis("S(0)")]
    again = np.array([False, False, True])
    table = costs.edge("w", layouts, mm, [1], [(Split("m"),)], again)
    gather = 2 + 1 + 1024 / 16
    assert table.seconds[2] - table.seconds[1] == gather
    assert table.bytes[:, 0].tolist() == [0, 2048, 0]
    parts = costs.transfers("w", axis("S(0)"), mm, [1], (Split("m"),), regathered=True)
    assert [(t.phase, t.collectives) for t in parts] == [
        (Phase.FORWARD, ("all_gather dp",)),
        (Phase.RECOMPUTE, ("all_gather dp",)),
        (Phase.BACKWARD, ("reduce_scatter dp",)),
    ]
    assert sum(part.seconds for part in parts) == table.seconds[2, 0]
    plain, op = model().model, model().graph.ops[0]
    assert not plain.reads_copy_twice("w", op, recomputed=False)  # gathering again saves nothing


def test_a_recomputed_operator_reads_a_kept_copy_or_gathers_again():
    costs = model()
    mm, layouts = costs.graph.ops[0], [axis("R"), axis("S(0)"), axis("S(0)")]
    again = np.array([False, False, True])
    table = costs.edge("w", layouts, mm, [1], [(Split("m"),)], again, recomputed=True)
    once = costs.edge("w", layouts, mm, [1], [(Split("m"),)], again)
    gather = 2 + 1 + 1024 / 16
    assert (table.seconds - once.seconds)[:, 0].tolist() == [0, 0, gather]
    assert table.bytes[:, 0].tolist() == [0, 2048, 0]
    assert once.bytes[:, 0].tolist() == [0, 0, 0]  # its backward pass does not read the weight
    for regathered, row in ((False, 1), (True, 2)):
        parts = costs.transfers(
            "w", axis("S(0)"), mm, [1], (Split("m"),), regathered=regathered, recomputed=True
        )
        assert (Phase.RECOMPUTE in [t.phase for t in parts]) == regathered
        assert sum(part.seconds for part in parts) == table.seconds[row, 0]


def test_an_input_has_no_gradient_to_move():
    costs = model()
    table = costs.edge("x", [axis("R")], costs.graph.ops[0], [0], [(Split("m"),), (Split("n"),)])
    assert table.seconds.tolist() == [[1 + 512 / 4096, 0]]  # cut, or as it is


def test_transfers_sum_to_the_edge():
    costs = model()
    mm = costs.graph.ops[0]
    for source in ("R", "S(0)", "S(1)"):
        for choice in MM.choices():
            edge = costs.edge("w", [axis(source)], mm, [1], [(choice,)]).seconds[0, 0]
            parts = costs.transfers("w", axis(source), mm, [1], (choice,))
            assert sum(part.seconds for part in parts) == edge


def twice(saves=()):
    """One value read in two positions: y = x @ w, z = y * y."""
    leaves = {"x": (INPUT, ((8,), (16,))), "w": (PARAMETER, ((16,), (32,)))}
    square = op("z", "mul", ["y", "y"], RELU_TWICE, saves=saves)
    return build(leaves, [op("y", "mm", ["x", "w"], MM), square])


RELU_TWICE = type(RELU)(RELU.factors, RELU.operands * 2, RELU.results)


def test_positions_that_want_the_same_share_one_redistribution():
    costs = model(graph=twice())
    square = costs.graph.ops[1]
    both = costs.edge("y", [axis("P")], square, [0, 1], [(None,)])
    assert both.seconds == costs.edge("y", [axis("P")], square, [0], [(None,)]).seconds


def test_positions_that_want_different_layouts_are_redistributed_each():
    graph, analysis = build(
        {"w": (PARAMETER, ((8,), (8,)))}, [op("y", "mm", ["w", "w"], SQUARE, saves=("w",))]
    )
    costs = model(graph=(graph, analysis))
    made = graph.ops[0]
    both, left, right = (
        costs.edge("w", [axis("S(1)")], made, at, [(Split("k"),)]) for at in ([0, 1], [0], [1])
    )
    assert both.seconds == left.seconds + right.seconds
    assert (left.bytes, right.bytes) == (0, 128)  # as stored, and another copy


SQUARE = type(MM)(
    tuple(type(f)(f.name, 8, f.kind) for f in MM.factors), MM.operands, MM.results, work=MM.work
)


def test_the_only_saver_pays_for_what_it_sees():
    costs = model(graph=twice(saves=("y",)))
    mm, square = costs.graph.ops
    assert costs.operator(mm, [(Split("k"),)]).bytes.tolist() == [0]
    table = costs.edge("y", [axis("P"), axis("S(0)")], square, [0, 1], [(None,), (Split("m"),)])
    assert table.bytes.tolist() == [[1024, 512], [1024, 512]]


def test_a_gathered_weight_that_is_saved_is_paid_by_its_edge():
    graph = build(
        {"x": (INPUT, ((8,), (16,))), "w": (PARAMETER, ((16,), (32,)))},
        [op("y", "mm", ["x", "w"], MM, saves=("x", "w"))],
    )
    costs = model(graph=graph)
    table = costs.edge("w", [axis("R"), axis("S(0)")], costs.graph.ops[0], [1], [(Split("m"),)])
    assert table.bytes[:, 0].tolist() == [0, 2048]


def layers(count):
    """The same layer again and again, under other names."""
    leaves = {"x": (INPUT, ((16,), (16,)))}
    ops, last = [], "x"
    found = type(MM)(
        tuple(type(f)(f.name, 16, f.kind) for f in MM.factors),
        MM.operands,
        MM.results,
        MM.additive,
        MM.linear,
        MM.work,
    )
    same = type(RELU)(found.factors[:1] + found.factors[2:], RELU.operands, RELU.results)
    for i in range(count):
        leaves[f"w{i}"] = (PARAMETER, ((16,), (16,)))
        saves = (last, f"w{i}")
        ops.append(op(f"y{i}", "mm", [last, f"w{i}"], found, saves=saves))
        ops.append(op(f"z{i}", "relu", [f"y{i}"], same, saves=(f"z{i}",)))
        last = f"z{i}"
    return build(leaves, ops)


def test_repeated_layers_share_their_tables():
    mesh = Mesh.parse("dp=2 tp=2")
    costs = model(mesh, graph=layers(3), devices=4)
    second, third = costs.graph.ops[2], costs.graph.ops[4]
    tables = costs.model
    assert tables.operator(second).seconds is tables.operator(third).seconds
    sources = [Layout(mesh, (p, q)) for p in (REPLICATE, Shard(0)) for q in (REPLICATE, Shard(1))]
    codes = costs.codes("z0", sources)
    one, other = tables.edge("z0", codes, second, [0]), tables.edge("z1", codes.copy(), third, [0])
    assert one.seconds is other.seconds and one.bytes is other.bytes
    one, other = (costs.parameter(leaf, sources) for leaf in costs.graph.leaves[2:4])
    assert one.seconds is other.seconds
    with pytest.raises(ValueError, match="read-only"):
        one.seconds[0] = 0


def test_rules_of_one_form_with_other_whole_factors_keep_their_own_layouts():
    leaves = {"w": (PARAMETER, ((8,), (32,)))}
    rows, columns = (rule("a b -> a b", whole=whole, a=8, b=32) for whole in ("a", "b"))
    graph = build(leaves, [op("y", "neg", ["w"], rows), op("z", "neg", ["w"], columns)])
    costs = model(graph=graph)
    found = [
        str(costs.result(made, (costs.analysis.rules[made.name].choices()[1],)))
        for made in costs.graph.ops
    ]
    assert found == ["dp:S(1)", "dp:S(0)"]


def test_rules_that_are_linear_in_other_operands_keep_their_own_layouts():
    leaves = dict.fromkeys("vw", (PARAMETER, ((8,), (32,))))
    rules = [rule("a b, a b -> a b", linear=[term], a=8, b=32) for term in ({0}, {1})]
    ops = [op(name, "mul", "vw", found) for name, found in zip("yz", rules, strict=True)]
    costs = model(graph=build(leaves, ops))
    found = [costs.operands(made, (PassPartial(0),)) for made in costs.graph.ops]
    assert [[str(at) for at in operands] for operands in found] == [
        ["dp:P", "dp:R"],
        ["dp:R", "dp:P"],
    ]


def test_factor_names_do_not_matter():
    leaves = {"w": (PARAMETER, ((8,), (32,)))}
    ops = [op("y", "neg", ["w"], RELU), op("z", "neg", ["w"], rule("a b -> a b", a=8, b=32))]
    costs = model(graph=build(leaves, ops))
    y, z = costs.graph.ops
    assert costs.options(y) is costs.options(z)
    whole = costs.codes("w", [axis("R")])
    assert costs.model.edge("w", whole, y, [0]) is costs.model.edge("w", whole, z, [0])


def test_a_spread_table_equals_the_entries_asked_one_by_one():
    mesh = Mesh.parse("dp=2 tp=2")
    costs = model(mesh, graph=layers(2), devices=4)
    relu, mm = costs.graph.ops[1:3]
    rules = costs.analysis.rules
    makes = [(a, b) for a in rules["z0"].choices() for b in rules["z0"].choices()]
    takes = [(a, b) for a in rules["y1"].choices() for b in rules["y1"].choices()]
    sources = [layouts_under(rules["z0"], tiling, mesh).results[0] for tiling in makes]
    table = costs.edge(relu.name, sources, mm, [0], takes)
    assert table.seconds.shape == table.bytes.shape == (len(makes), len(takes))
    for i, source in enumerate(sources):
        for j, tiling in enumerate(takes):
            one = costs.edge(relu.name, [source], mm, [0], [tiling])
            assert (one.seconds, one.bytes) == (table.seconds[i, j], table.bytes[i, j])


def test_the_transient_allowance_is_that_of_the_largest_operator():
    costs = model()
    whole = {op.name: (None,) for op in costs.graph.ops}
    assert costs.transient_bytes(whole) == 512 + 2 * 2048 + 2 * 1024
    assert costs.transient_bytes(whole | {"y": (Split("n"),)}) == 4096  # relu's, now
    assert costs.fixed_bytes() == 512


def test_mistakes_are_told_at_once():
    with pytest.raises(OptimizerError):
        model(optimizer="lion")


layouts = st.sampled_from([axis(text) for text in ("R", "S(0)", "S(1)")])


@given(layouts, st.sampled_from(["sgd", "momentum", "adamw"]))
def test_a_storage_layout_never_needs_more_than_the_replicated(layout, optimizer):
    costs = model(optimizer=optimizer)
    (leaf,) = costs.graph.leaves_of(PARAMETER)
    stored, whole = costs.parameter(leaf, [layout, axis("R")]).bytes
    assert stored <= whole


@given(st.integers(0, 4), st.integers(0, 4), st.sampled_from(["nccl", "gloo"]))
def test_a_slower_link_never_makes_a_table_cheaper(first, second, backend):
    fast, slow = model(backend=backend), model(backend=backend, bandwidth=4.0, latency=2.0)
    mm, relu = fast.graph.ops[:2]
    makes, takes = MM.choices(), RELU.choices()
    sources = [layouts_under(MM, (choice,), TWO).results[0] for choice in makes]
    tilings = [(choice,) for choice in takes]
    a, b = (costs.edge(mm.name, sources, relu, [0], tilings) for costs in (fast, slow))
    assert np.all(a.seconds <= b.seconds)
    assert np.all(a.bytes == b.bytes)


def classified():
    """The mean of a weighted loss, of which the number of targets is another sum."""

    class Classified(nn.Linear):
        def forward(self, x, classes):
            return F.cross_entropy(super().forward(x), classes), self.weight.abs().sum()

    batch = {"x": torch.ones(6, 8), "classes": torch.zeros(6, dtype=torch.long)}
    graph = capture_call(Classified(8, 5), (), batch).graph
    return graph, analyze(graph)


@pytest.mark.parametrize("batches", [1, 4])
def test_numbers_on_their_way_while_operators_run_cost_nothing(batches):
    graph, analysis = classified()
    costs = CostModel(graph, analysis, toy_machine(), TWO, Pricing(micro_batches=batches))
    partial = np.array([encode(axis("P"), ())])
    div = graph.producer[graph.outputs[0]]
    assert div.target == "aten.div.Tensor"
    (whole,) = np.flatnonzero(~costs.options(div).operands.any(axis=0))
    for i, name in enumerate(div.operands):
        assert costs.edge(name, partial, div, [i]).seconds[0, whole] == 0
        again = costs.edge(name, partial, div, [i], recomputed=True).seconds[0, whole]
        assert again > 0
        found = costs.transfers(name, partial[0], (0, 0), div)
        assert [(t.collectives, t.seconds) for t in found] == [(("all_reduce dp",), 0)]
        once_more = costs.transfers(name, partial[0], (0, 0), div, recomputed=True)
        assert sum(t.seconds for t in once_more) == again
        want = Want(np.zeros(1, np.int64), np.zeros(1, np.int64))
        assert costs.shared_read(name, partial, want, [div]).seconds == 0
        assert costs.shared_read(name, partial, want, [div], recomputed=True).seconds == again
    for name in graph.outputs:  # whatever is returned is seen at the end
        assert costs.returning(name, partial) == 0
        assert [t.seconds for t in costs.returned(name, int(partial[0]))] == [0]


def test_a_sum_whose_gradient_is_summed_too_costs_both():
    graph, analysis = classified()
    costs = CostModel(graph, analysis, toy_machine(), TWO)
    partial = encode(axis("P"), ())
    div = graph.producer[graph.outputs[0]]
    both = costs.transfers(div.operands[0], partial, (0, partial), div)
    assert len(both) == 2 and all(t.seconds > 0 for t in both)
