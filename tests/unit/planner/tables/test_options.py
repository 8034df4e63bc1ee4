import pytest

from shardwright.ir.layout import Mesh
from shardwright.planner.tables.layout_codes import decode
from shardwright.planner.tables.options import OptionCache
from shardwright.rules.placements import tilings
from shardwright.rules.rule import Split
from shardwright.simulate.costs.tile_sizes import local_sizes
from tests.harness.small_graphs import MM, RELU, SUM, rule

MESH = Mesh.parse("dp=2 tp=4")
UNEVEN = rule("(a b) c, b -> c (a b), b", additive=[1], linear=[{0}], a=3, b=5, c=9)


@pytest.mark.parametrize("found", [MM, RELU, SUM, UNEVEN])
@pytest.mark.parametrize("mesh", ["dp=2 tp=4", "dp=3", "dp=1 tp=2", "a=2 b=2 c=2"])
def test_options_are_the_feasible_tilings_with_their_layouts_and_sizes(found, mesh):
    mesh = Mesh.parse(mesh)
    options = OptionCache(mesh).options(found)
    expected = list(tilings(found, mesh))
    assert [options.tiling(found, k) for k in range(len(options))] == [one for one, _ in expected]
    for k, (tiling, placed) in enumerate(expected):
        assert options.find(found, tiling) == k
        assert tuple(options.sizes[:, k].tolist()) == local_sizes(found, tiling, mesh)
        for codes, dims, layouts in (
            (options.operands, found.operands, placed.operands),
            (options.grads, found.operands, placed.operand_grads),
            (options.results, found.results, placed.results),
        ):
            atoms = [found.atoms(one) for one in dims]
            read = [decode(int(c), a, mesh) for c, a in zip(codes[:, k], atoms, strict=True)]
            assert read == list(layouts)


def test_a_tiling_that_is_not_feasible_is_not_found():
    options = OptionCache(MESH).options(MM)
    with pytest.raises(ValueError):
        options.find(MM, (Split("m"), Split("nowhere")))


def test_choices_that_are_left_leave_their_options():
    every = OptionCache(MESH).options(MM)
    m, passes = 1, len(MM.choices()) - 1
    left = (frozenset({m}), frozenset({0, m, passes}))
    some = OptionCache(MESH).options(MM, left)
    kept = [k for k, (a, b) in enumerate(every.choices) if a in left[0] and b in left[1]]
    assert 0 < len(kept) < len(every)
    assert some.choices == tuple(every.choices[k] for k in kept)
    for field in ("sizes", "operands", "grads", "results"):
        assert (getattr(some, field) == getattr(every, field)[:, kept]).all()


def test_rules_of_one_form_share_their_options():
    book = OptionCache(MESH)
    assert book.options(RELU) is book.options(rule("x y -> x y", x=8, y=32))
    assert book.options(RELU) is not book.options(rule("x y -> x y", x=8, y=31))


def test_rules_that_differ_in_sizes_only_have_the_options_that_each_has_alone():
    shared, counts = OptionCache(MESH), set()
    for y in (32, 31, 5, 3):  # of which more and more tilings leave a tile empty
        found = rule("x y -> x y", x=8, y=y)
        one, other = shared.options(found), OptionCache(MESH).options(found)
        assert one.choices == other.choices
        for field in ("sizes", "operands", "grads", "results"):
            assert (getattr(one, field) == getattr(other, field)).all()
        counts.add(len(one))
    assert len(counts) > 1
