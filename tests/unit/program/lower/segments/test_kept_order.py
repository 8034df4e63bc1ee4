"""The order of a segment that keeps some of its operators."""

from dataclasses import replace
from itertools import groupby

from shardwright.ir.graph import Op, Ref
from shardwright.program.instructions import Compute, Load, reads, writes
from shardwright.program.lower.segments.kept_order import in_few_runs


def compute(name, *operands):
    op = Op(name, "aten.add.Tensor", tuple(Ref(x) for x in operands), (), (name,))
    return Compute(op, ((2,),))


LAYER = [
    compute("norm", "x"),
    Load("wq", "wq/local", (2,)),
    compute("q", "norm", "wq/local"),
    compute("q.view", "q"),
    compute("rotated", "q.view"),
    Load("wk", "wk/local", (2,)),
    compute("k", "norm", "wk/local"),
    compute("k.view", "k"),
    compute("cut", "rotated"),
    compute("attention", "cut", "k.view"),
    compute("out", "attention"),
]
KEPT = frozenset({"q", "q.view", "k", "k.view", "attention"})
VIEWS = {"q.view", "k.view", "cut"}


def runs(instructions, kept):
    named = [one.op.name for one in instructions if isinstance(one, Compute)]
    return [(keeps, [*names]) for keeps, names in groupby(named, kept.__contains__)]


def test_operators_of_a_kind_follow_each_other():
    order, kept = in_few_runs(LAYER, KEPT, VIEWS)
    assert sorted(map(str, order)) == sorted(map(str, LAYER))
    made = {"x", "wq", "wk"}
    for one in order:
        assert made.issuperset(reads(one)), one
        made.update(writes(one))
    # A view of what is kept goes with its first reader; one of a recomputed value is recomputed.
    assert runs(order, kept) == [
        (False, ["norm"]),
        (True, ["q", "k"]),
        (False, ["q.view", "rotated", "cut"]),
        (True, ["k.view", "attention"]),
        (False, ["out"]),
    ]


def test_operators_that_communicate_stay_in_their_place():
    routed = replace(LAYER[4], routing=object())
    given = [*LAYER[:4], routed, *LAYER[5:]]
    order, kept = in_few_runs(given, KEPT, VIEWS)
    assert runs(order, kept)[1:4] == [
        (True, ["q"]),
        (False, ["q.view", "rotated", "cut"]),
        (True, ["k", "k.view", "attention"]),
    ]
