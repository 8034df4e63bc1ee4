"""The serial graph: what it prints, what `verify` refuses, what its fingerprint depends on."""

from dataclasses import replace

import pytest

from shardwright.ir.graph import (
    Graph,
    Leaf,
    LeafKind,
    Op,
    Ref,
    Source,
    Symbol,
    Tensor,
    VerifyError,
    verify,
)

MATMUL = Op("mm", "aten.mm.default", (Ref("x"), Ref("w")), (), ("mm",), Source("up", "model.py", 3))
CAST = Op(
    "copy",
    "aten._to_copy.default",
    (Ref("mm"),),
    (("dtype", Symbol("dtype", "float16")),),
    ("copy",),
    saves=("mm",),
    extra_saved=5,
)
GRAPH = Graph(
    leaves=(
        Leaf("w", LeafKind.PARAMETER, ("up.weight", "down.weight")),
        Leaf("count", LeafKind.BUFFER, ("count",)),
        Leaf("x", LeafKind.INPUT, ("args.0",)),
    ),
    ops=(MATMUL, CAST),
    outputs=("copy",),
    values=(
        Tensor("w", (6, 4), "float32", True),
        Tensor("count", (), "int64"),
        Tensor("x", (5, 6), "float32"),
        Tensor("mm", (5, 4), "float32", True),
        Tensor("copy", (5, 4), "float16", True),
    ),
    updates=(("count", "count"),),
)


def test_it_prints_as_text():
    verify(GRAPH)
    assert str(GRAPH) == (
        "%w: float32[6, 4]' = parameter up.weight, down.weight\n"
        "%count: int64[] = buffer count\n"
        "%x: float32[5, 6] = input args.0\n"
        "%mm = aten.mm.default(%x, %w): float32[5, 4]'\n"
        "%copy = aten._to_copy.default(%mm, dtype=float16): float16[5, 4]'\n"
        "update %count <- %count\n"
        "return %copy"
    )
    assert str(MATMUL.source) == "up (model.py:3)"


def test_it_knows_who_makes_and_who_reads_a_value():
    assert GRAPH.producer == {"mm": MATMUL, "copy": CAST}
    assert GRAPH.consumers["x"] == GRAPH.consumers["w"] == (MATMUL,)
    assert GRAPH.consumers["copy"] == ()
    square = Op("s", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), ("s",))
    assert square.operands == ("x", "x")
    twice = replace(
        GRAPH, ops=(*GRAPH.ops, square), values=(*GRAPH.values, Tensor("s", (5, 6), "float32"))
    )
    assert twice.consumers["x"] == (MATMUL, square), "each reader once"


def test_operands_are_found_inside_of_lists_and_keywords():
    op = Op("c", "aten.f.default", ((Ref("a"), None, (Ref("b"),)),), (("k", Ref("c")),), ("c",))
    assert op.operands == ("a", "b", "c")


def test_tensors_know_their_bytes():
    assert GRAPH.tensor["w"].bytes == 96
    assert GRAPH.tensor["copy"].bytes == 40
    assert GRAPH.tensor["count"].bytes == 8
    assert Tensor("z", (3, 0), "float64").bytes == 0


BROKEN = {
    "described twice": (
        replace(GRAPH, values=(*GRAPH.values, GRAPH.values[0])),
        "%w is described 2 times",
    ),
    "read before defined": (
        replace(GRAPH, ops=(CAST, MATMUL)),
        "reads %mm before it is defined",
    ),
    "read but never defined": (
        replace(GRAPH, leaves=GRAPH.leaves[1:], ops=GRAPH.ops),
        "reads %w before it is defined",
    ),
    "defined twice": (
        replace(GRAPH, ops=(MATMUL, MATMUL)),
        "%mm is defined twice",
    ),
    "not described": (
        replace(GRAPH, values=GRAPH.values[:-1]),
        "%copy has no shape and dtype",
    ),
    "returned but never defined": (
        replace(GRAPH, outputs=("loss",)),
        "%loss is returned but never defined",
    ),
    "updated but an input": (
        replace(GRAPH, updates=(("x", "mm"),)),
        "%x is updated but is no buffer and no parameter",
    ),
    "described but never defined": (
        replace(GRAPH, values=(*GRAPH.values, Tensor("y", (), "bool"))),
        "%y is described but never defined",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_graph_is_named(name):
    graph, message = BROKEN[name]
    with pytest.raises(VerifyError) as broken:
        verify(graph)
    assert message in str(broken.value)


def _moved(graph):
    ops = [replace(op, source=Source("elsewhere", "other.py", 99)) for op in graph.ops]
    return replace(graph, ops=tuple(ops))


def test_the_fingerprint_names_the_computation_and_not_where_it_stands():
    assert _moved(GRAPH).fingerprint == GRAPH.fingerprint


CHANGED = {
    "target": replace(GRAPH, ops=(replace(MATMUL, target="aten.bmm.default"), CAST)),
    "argument": replace(
        GRAPH, ops=(MATMUL, replace(CAST, kwargs=(("dtype", Symbol("dtype", "bfloat16")),)))
    ),
    "shape": replace(
        GRAPH, values=tuple(replace(v, shape=(9, *v.shape[1:])) for v in GRAPH.values)
    ),
    "dtype": replace(GRAPH, values=(replace(GRAPH.values[0], dtype="float64"), *GRAPH.values[1:])),
    "gradient": replace(
        GRAPH, values=(replace(GRAPH.values[0], requires_grad=False), *GRAPH.values[1:])
    ),
    "name of a parameter": replace(
        GRAPH, leaves=(Leaf("w", LeafKind.PARAMETER, ("up.weight",)), *GRAPH.leaves[1:])
    ),
    "kind of a leaf": replace(
        GRAPH, leaves=(Leaf("w", LeafKind.BUFFER, GRAPH.leaves[0].keys), *GRAPH.leaves[1:])
    ),
    "outputs": replace(GRAPH, outputs=("mm",)),
    "updates": replace(GRAPH, updates=()),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_computation_has_another_fingerprint(name):
    assert CHANGED[name].fingerprint != GRAPH.fingerprint
