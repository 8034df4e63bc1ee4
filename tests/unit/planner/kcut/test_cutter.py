from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh, fits
from shardwright.machine.presets import preset
from shardwright.planner.kcut.cutter import CutError, Cutter
from shardwright.planner.meshes.meshes import mesh_of_cuts
from shardwright.planner.tables.layout_codes import decode, encode, joined
from shardwright.rules.rule import Split
from tests.harness.kcut_oracle import Net
from tests.harness.layered_graphs import Writer, residual_layers

MACHINE = preset("8xH100")


def mesh_of(parts):
    return Mesh(tuple((f"k{i}", p) for i, p in enumerate(parts, start=1)))


def graph_of(net):
    w = Writer()
    w.leaf("x", LeafKind.INPUT, *net.shape["x"])
    for name, kind, operands, shape in net.ops:
        if kind == "linear":
            w.linear(name, *operands, *shape)
        else:
            target = {"add": "add.Tensor", "relu": "relu.default"}[kind]
            w.call(name, target, shape, *operands, saves=(name,) if kind == "relu" else ())
    return w.graph(w.call("loss", "sum.default", (), net.ops[-1][0]))


@st.composite
def nets(draw, parts, sizes, most=4):
    """Nets with skips and branches, of operators that all decide for themselves.

    So a relu reads what may be partial sums, and an addition two different values.
    """
    rows = draw(st.sampled_from(sizes))
    shapes, ops = {"x": (rows, draw(st.sampled_from(sizes)))}, []
    for i in range(draw(st.integers(1, most))):
        made = [name for name, *_ in ops]
        sums = [name for name in made if not name.startswith("relu")]
        pairs = [(a, b) for a in made for b in made if a < b and shapes[a] == shapes[b]]
        kind = draw(st.sampled_from(["linear", *["relu"] * bool(sums), *["add"] * bool(pairs)]))
        if kind == "linear":
            operands = (draw(st.sampled_from(list(shapes))),)
            shape = (rows, draw(st.sampled_from(sizes)))
        else:
            operands = (draw(st.sampled_from(sums)),)
            operands = operands if kind == "relu" else draw(st.sampled_from(pairs))
            shape = shapes[operands[0]]
        ops.append((f"{kind}{i}", kind, operands, shape))
        shapes[f"{kind}{i}"] = shape
    return Net(ops, shapes["x"], parts)


def words(cutter, cuts):
    """Operator -> the forms it takes, one for each cut."""
    rules = cutter.analysis.rules
    return {
        name: tuple(str(rules[name].choices()[k]) for k in numbers)
        for name, numbers in cuts.tilings.items()
    }


def forms(net, cutter, cuts):
    found = words(cutter, cuts)
    return {name: found[name] for name, *_ in net.ops}


def check_cuts(net):
    """Every cut moves what it says, and no other could move less, given those before it."""
    cutter = Cutter(graph_of(net), MACHINE)
    earlier = {name: () for name, *_ in net.ops}
    for i in range(1, len(net.parts) + 1):
        cuts = cutter.cut(mesh_of(net.parts[:i]))
        chosen = forms(net, cutter, cuts)
        assert {name: found[:-1] for name, found in chosen.items()} == earlier
        assert cuts.bytes == pytest.approx(net.cost(chosen))
        assert cuts.bytes == pytest.approx(net.best(earlier))
        assert cuts.bytes == pytest.approx(cutter.crossing(cuts))
        earlier = chosen


SIZES = [2, 3, 4, 5, 6, 8, 9, 13]


@pytest.mark.parametrize("parts", [2, 3])
def test_one_cut_equals_enumeration(parts):
    @settings(max_examples=60)
    @given(nets((parts,), SIZES))
    def check(net):
        check_cuts(net)

    check()


@settings(max_examples=40)
@given(nets((2, 3), SIZES, most=3))
def test_every_further_cut_is_the_best_given_those_before(net):
    check_cuts(net)


@settings(max_examples=25)
@given(nets((2, 2), SIZES, most=3))
def test_cuts_made_at_once_are_never_worse_and_move_what_they_say(net):
    cutter = Cutter(graph_of(net), MACHINE)
    one_by_one, joint = (cutter.cut(mesh_of((2, 2)), at_once) for at_once in (1, 2))
    assert len(one_by_one.crossing) == 2 and len(joint.crossing) == 1
    assert joint.bytes <= one_by_one.bytes * (1 + 1e-12)
    assert joint.bytes == pytest.approx(net.cost(forms(net, cutter, joint)))


def layers(batch, *widths):
    w = Writer()
    x = w.leaf("x", LeafKind.INPUT, batch, widths[0])
    for i, width in enumerate(widths[1:]):
        x = w.linear(f"layer{i}", x, batch, width)
        x = w.call(f"relu{i}", "relu.default", (batch, width), x, saves=(f"relu{i}",))
    return w.graph(w.call("loss", "sum.default", (), x))


def by_batch(op, rule, choice):
    """Splits of a result's first dimension, and any split of a loss."""
    first = rule.results[0][0][0] if rule.results[0] else None
    return isinstance(choice, Split) and first in (None, choice.factor)


@pytest.mark.parametrize("parts", [(2,), (2, 2), (2, 2, 2), (2,) * 6, (3, 2), (5, 3)])
def test_data_parallelism_over_n_devices_moves_twice_the_weights_for_each_but_one(parts):
    graph = layers(360, 7, 12, 9)
    cutter = Cutter(graph, MACHINE, legal=by_batch)
    cuts = cutter.cut(mesh_of(parts))
    weights = 4 * (7 * 12 + 12 * 9)
    assert cuts.bytes == 2 * (prod(parts) - 1) * weights
    if set(parts) == {2}:  # in halves, every cut moves twice what the one before it did
        assert cuts.crossing == tuple(2 * 2**i * weights for i in range(len(parts)))
    assert set(words(cutter, cuts)["layer1"]) == {"b0"}
    assert set(cuts.storage["layer1.weight"]) == {0}


def test_big_batches_are_cut_by_batch_and_big_layers_by_features():
    tall, wide = layers(65536, 64, 64, 64), layers(64, 4096, 4096, 4096)
    for graph, chosen in ((tall, {"b0"}), (wide, {"n", "k"})):
        cutter = Cutter(graph, MACHINE)
        found = words(cutter, cutter.cut(mesh_of((2, 2))))
        assert {*found["layer0"], *found["layer1"]} <= chosen


@pytest.mark.parametrize("devices", [3, 5, 6, 7, 8])
def test_no_device_is_left_without_a_tile(devices):
    graph = layers(6, 5, 7, 3)
    mesh = mesh_of_cuts(MACHINE.with_devices(devices))
    cutter = Cutter(graph, MACHINE)
    cuts = cutter.cut(mesh)
    space, atoms = cutter.space(cuts), cutter.analysis.atoms
    for op in graph.ops:
        options = space.model.options(op)
        assert len(options) == 1
        for name, code in zip(op.operands, options.operands[:, 0].tolist(), strict=True):
            assert fits(atoms[name], decode(code, atoms[name], mesh))
    for name, layout in space.storage((0,) * len(space.problem.nodes)).items():
        assert fits(atoms[name], layout)
        assert encode(layout, atoms[name]) == joined(np.array(cuts.storage[name]))


def test_what_can_be_divided_is_not_computed_whole():
    graph = residual_layers(3)
    cutter = Cutter(graph, MACHINE)
    found = words(cutter, cutter.cut(mesh_of((2, 2, 2))))
    assert not [name for name, chosen in found.items() if "None" in chosen]


def test_of_equals_the_one_of_least_memory_is_taken():
    """A bias is gathered and its gradient scattered for what reducing the gradient costs."""
    w = Writer()
    x = w.leaf("x", LeafKind.INPUT, 64, 8)
    weight, bias = w.weight("weight", 6, 8), w.weight("bias", 6)
    y = w.call("y", "linear.default", (64, 6), x, weight, bias, saves=(x, weight))
    graph = w.graph(w.call("loss", "sum.default", (), y))
    cutter = Cutter(graph, MACHINE, legal=by_batch)
    cuts = cutter.cut(mesh_of((2,)))
    assert cuts.bytes == 2 * 4 * (48 + 6)
    assert cuts.storage["weight"] == (0,) and cuts.storage["bias"] != (0,)
    copies = dict.fromkeys(cuts.storage, (0,))
    assert cutter.crossing(replace(cuts, storage=copies)) == cuts.bytes


def test_too_many_cuts_are_refused_in_one_line():
    with pytest.raises(CutError, match="means 11 cuts, and 10 can be made; use fewer devices"):
        Cutter(layers(8, 4, 4), MACHINE).cut(mesh_of((2,) * 11))


def test_the_same_graph_is_cut_the_same_way():
    first, again = (Cutter(residual_layers(2), MACHINE).cut(mesh_of((2, 2))) for _ in range(2))
    assert first == again
