"""What one choice of a rule means for operands, results and their gradients."""

import pytest

from shardwright.ir.layout import PARTIAL, REPLICATE, Mesh, Shard
from shardwright.rules.placements import layouts_under, parse_tiling, tiling_text, tilings
from shardwright.rules.rule import Factor, FactorKind, PassPartial, Rule, Split

MKN = {"m": 5, "k": 6, "n": 7}
LINEAR = Rule(
    factors=tuple(Factor(name, size, FactorKind.PARALLEL) for name, size in MKN.items()),
    operands=((("m",), ("k",)), (("n",), ("k",)), (("n",),)),
    results=((("m",), ("n",)),),
    additive=frozenset({2}),
)
ADD = Rule(
    factors=(Factor("d", 6, FactorKind.PARALLEL), Factor("w", 4, FactorKind.WHOLE)),
    operands=((("d",), ("w",)), (("d",), ("w",))),
    results=((("d",), ("w",)),),
    linear=(frozenset({0, 1}),),
)
MUL = Rule(
    factors=ADD.factors,
    operands=ADD.operands,
    results=ADD.results,
    linear=(frozenset({0}), frozenset({1})),
)
S0, S1, R, P = Shard(0), Shard(1), REPLICATE, PARTIAL


@pytest.mark.parametrize(
    "rule, choice, operands, results, grads",
    [
        (LINEAR, None, (R, R, R), (R,), (R, R, R)),
        (LINEAR, Split("m"), (S0, R, R), (S0,), (S0, P, P)),  # data parallel
        (LINEAR, Split("n"), (R, S0, S0), (S1,), (P, S0, S0)),  # column parallel
        (LINEAR, Split("k"), (S1, S1, P), (P,), (S1, S1, R)),  # row parallel
        (ADD, Split("d"), (S0, S0), (S0,), (S0, S0)),
        (ADD, PassPartial(0), (P, P), (P,), (R, R)),
        (MUL, PassPartial(0), (P, R), (P,), (R, P)),
        (MUL, PassPartial(1), (R, P), (P,), (P, R)),
    ],
)
def test_a_choice_places_operands_results_and_gradients(rule, choice, operands, results, grads):
    axis_placements = rule.axis_placements(choice)
    assert axis_placements.operands == operands
    assert axis_placements.results == results
    assert axis_placements.operand_grads == grads
    assert axis_placements.result_grads == tuple(R if p == P else p for p in results)


def test_whole_factors_are_no_choice():
    assert ADD.choices() == (None, Split("d"), PassPartial(0))


def test_a_rule_prints_as_its_notation():
    assert str(LINEAR) == "m k, n k, +n -> m n"


def test_tilings_are_those_that_leave_no_device_without_a_tile():
    mesh = Mesh.parse("a=4")
    found = [tiling_text(tiling) for tiling, _ in tilings(LINEAR, mesh)]
    # Five rows on four devices are 2, 2, 1 and none.
    assert found == [("-",), ("n",)]
    two = [" ".join(tiling_text(t)) for t, _ in tilings(LINEAR, Mesh.parse("a=2 b=2"))]
    assert two[0] == "- -"
    assert "k k" in two and "m n" in two
    assert len(two) == len(set(two)) == 16  # "m m" too: five rows are (2, 1) and (1, 1)


def test_axes_of_size_one_have_no_choice():
    found = list(tilings(LINEAR, Mesh.parse("a=1 b=2")))
    assert {tiling[0] for tiling, _ in found} == {None}


def test_layouts_on_several_axes_are_made_axis_by_axis():
    op_layouts = layouts_under(LINEAR, (Split("m"), Split("k")), Mesh.parse("dp=2 tp=2"))
    assert [str(layout) for layout in op_layouts.operands] == [
        "dp:S(0) tp:S(1)",
        "dp:R tp:S(1)",
        "dp:R tp:P",
    ]
    assert str(op_layouts.results[0]) == "dp:S(0) tp:P"
    assert [str(layout) for layout in op_layouts.operand_grads] == [
        "dp:S(0) tp:S(1)",
        "dp:P tp:S(1)",
        "dp:P tp:R",
    ]


def test_tilings_read_back():
    for rule in (LINEAR, ADD, MUL):
        for tiling, _ in tilings(rule, Mesh.parse("a=2 b=2")):
            assert parse_tiling(rule, tiling_text(tiling)) == tiling
    with pytest.raises(ValueError, match=r"'x' is no tiling of m k, n k, .*one of -, m, k, n"):
        parse_tiling(LINEAR, ("m", "x"))
