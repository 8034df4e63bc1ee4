import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.layout import Layout, Mesh, fits
from shardwright.rules.rule import PassPartial, Split
from shardwright.simulate.costs.layouts import (
    feasible,
    local_bytes,
    local_sizes,
    operand_grad_layout,
    operand_layout,
    result_layout,
    tiling_layouts,
)
from tests.harness.small_graphs import MM, rule

MESH = Mesh.parse("dp=2 tp=4")


def test_each_axis_places_what_its_choice_says():
    tiling = (Split("m"), Split("k"))
    assert str(operand_layout(MM, tiling, 0, MESH)) == "dp:S(0) tp:S(1)"
    assert str(operand_layout(MM, tiling, 1, MESH)) == "dp:R tp:S(0)"
    assert str(result_layout(MM, tiling, 0, MESH)) == "dp:S(0) tp:P"
    assert str(operand_grad_layout(MM, tiling, 0, MESH)) == "dp:S(0) tp:S(1)"
    assert str(operand_grad_layout(MM, tiling, 1, MESH)) == "dp:P tp:S(0)"


def test_collected_layouts_equal_those_asked_one_by_one():
    tilings = [(a, b) for a in MM.choices() for b in MM.choices()]
    for tiling, found in zip(tilings, tiling_layouts(MM, tilings, MESH), strict=True):
        for i in range(2):
            assert found.operands[i] == operand_layout(MM, tiling, i, MESH)
            assert found.operand_grads[i] == operand_grad_layout(MM, tiling, i, MESH)
        assert found.results == (result_layout(MM, tiling, 0, MESH),)
        assert found.result_grads == (found.results[0].dual(),)


def test_a_mesh_without_axes_is_one_device():
    (found,) = tiling_layouts(MM, [()], Mesh(()))
    assert found.operands == (Layout(Mesh(()), ()),) * 2
    assert len(found.results) == 1


def test_local_sizes_are_those_of_the_largest_tile():
    assert local_sizes(MM, (None, None), MESH) == (8, 16, 32)
    assert local_sizes(MM, (Split("m"), Split("k")), MESH) == (4, 4, 32)
    assert local_sizes(MM, (PassPartial(0), Split("n")), MESH) == (8, 16, 8)
    uneven = rule("a -> a", a=7)
    assert local_sizes(uneven, (Split("a"), Split("a")), MESH) == (1,)
    assert local_sizes(uneven, (Split("a"), None), MESH) == (4,)


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
    assert feasible(rule("a -> a", a=size), choices, MESH) is possible


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 15), st.integers(0, 15))
def test_feasible_means_that_every_operand_and_result_fits(a, b, first, second):
    found = rule("a b, b -> (a b), a", a=a, b=b)
    options = found.choices()
    tiling = (options[first % len(options)], options[second % len(options)])
    (placed,) = tiling_layouts(found, [tiling], MESH)
    pairs = zip((*found.operands, *found.results), (*placed.operands, *placed.results), strict=True)
    assert feasible(found, tiling, MESH) == all(fits(found.atoms(d), at) for d, at in pairs)


def test_local_bytes_are_those_of_the_largest_tile():
    layout = Layout.parse("dp:S(0) tp:S(1.1)", MESH)
    assert local_bytes(((7,), (3, 9)), 2, layout) == 4 * 3 * 3 * 2
    assert local_bytes((), 4, Layout.replicated(MESH)) == 4
