import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.layout import Layout, Mesh, chunk
from shardwright.rules.placements import feasible, layouts_under, parse_tiling, tiling_text, tilings
from shardwright.rules.rule import Split
from tests.harness.small_graphs import MM, rule

MESH = Mesh.parse("dp=2 tp=4")


def is_feasible(found, tiling):
    return feasible(found, layouts_under(found, tiling, MESH))


def test_each_axis_places_what_its_choice_says():
    found = layouts_under(MM, (Split("m"), Split("k")), MESH)
    assert [str(layout) for layout in found.operands] == ["dp:S(0) tp:S(1)", "dp:R tp:S(0)"]
    assert [str(layout) for layout in found.results] == ["dp:S(0) tp:P"]
    assert [str(layout) for layout in found.operand_grads] == ["dp:S(0) tp:S(1)", "dp:P tp:S(0)"]


def test_a_mesh_without_axes_is_one_device():
    found = layouts_under(MM, (), Mesh(()))
    assert found.operands == (Layout(Mesh(()), ()),) * 2
    assert len(found.results) == 1


@pytest.mark.parametrize(
    "size, tiling, possible",
    [
        (8, "aa", True),
        (7, "a-", True),
        (5, "-a", False),  # tiles of 2, 2, 1 and 0
        (5, "aa", False),  # tiles of 3 and 2, the 2 cut into 1, 1, 0, 0
        (1, "a-", False),
        (1, "--", True),
    ],
)
def test_a_tiling_that_leaves_a_device_without_work_is_not_feasible(size, tiling, possible):
    choices = tuple(Split("a") if letter == "a" else None for letter in tiling)
    assert is_feasible(rule("a -> a", a=size), choices) is possible


def last_tile(found, tiling):
    """Sizes of the factors on the last device, whose tiles are the smallest."""
    sizes = {factor.name: factor.size for factor in found.factors}
    for choice, parts in zip(tiling, MESH.shape, strict=True):
        for factor in found.cuts(choice):
            sizes[factor] = chunk(sizes[factor], parts, parts - 1)[1]
    return sizes.values()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 15), st.integers(0, 15))
def test_feasible_means_that_the_last_tile_of_every_factor_is_not_empty(a, b, first, second):
    found = rule("a b, b -> (a b), a", a=a, b=b)
    options = found.choices()
    tiling = (options[first % len(options)], options[second % len(options)])
    assert is_feasible(found, tiling) == all(last_tile(found, tiling))


def test_tilings_are_the_feasible_ones_and_the_words_of_each_name_it():
    found = list(tilings(MM, MESH))
    assert found[0][0] == (None, None)
    assert all(is_feasible(MM, tiling) for tiling, _ in found)
    for tiling, layouts in found:
        assert layouts == layouts_under(MM, tiling, MESH)
        assert parse_tiling(MM, tiling_text(tiling)) == tiling
