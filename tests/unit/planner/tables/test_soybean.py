from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.graph import Tensor
from shardwright.ir.layout import Layout, Mesh
from shardwright.planner.tables.layout_codes import encode
from shardwright.planner.tables.soybean import Communication

ROWS, COLUMNS = "S(0)", "S(1)"
ITEM = 4


def crossing(atoms, mesh, src, dst):
    """Bytes of one conversion, in words: `S(0) R`, a placement for each axis of `mesh`."""
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    codes = [
        np.array([encode(Layout.parse(_named(text, mesh), mesh), atoms)]) for text in (src, dst)
    ]
    return float(Communication(mesh).redistributions(atoms, ITEM, *codes)[0])


def _named(text, mesh):
    return " ".join(f"{name}:{p}" for name, p in zip(mesh.names, text.split(), strict=True))


@pytest.mark.parametrize(
    "src, dst, share",
    [
        (ROWS, ROWS, 0),
        (ROWS, COLUMNS, 1 / 2),
        (COLUMNS, ROWS, 1 / 2),
        (ROWS, "R", 1),
        (COLUMNS, "R", 1),
        ("R", "R", 0),
        ("R", ROWS, 0),
        ("R", COLUMNS, 0),
        ("P", ROWS, 1),
        ("P", COLUMNS, 1),
        ("P", "R", 2),
        ("R", "P", 0),
        (ROWS, "P", 0),
    ],
)
def test_the_papers_table_for_a_cut_into_halves(src, dst, share):
    atoms = ((6,), (10,))
    assert crossing(atoms, "k1=2", src, dst) == share * 60 * ITEM


def test_a_cut_into_more_parts_moves_what_they_lack():
    atoms = ((7,), (11,))  # tiles of three, three and one row
    whole = 77 * ITEM
    assert crossing(atoms, "k1=3", ROWS, "R") == 2 * whole
    assert crossing(atoms, "k1=3", "P", COLUMNS) == 2 * whole
    assert crossing(atoms, "k1=3", "P", "R") == 4 * whole
    assert crossing(atoms, "k1=3", ROWS, COLUMNS) == pytest.approx(2 / 3 * whole)


factors = st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=5)


def _mesh(parts):
    return Mesh(tuple((f"k{i}", p) for i, p in enumerate(parts)))


@given(factors, st.integers(1, 9), st.integers(1, 9))
def test_data_parallel_gradients_cost_twice_the_others_of_n_devices(parts, rows, columns):
    atoms, mesh = ((rows,), (columns,)), _mesh(parts)
    partial, whole = " ".join("P" for _ in parts), " ".join("R" for _ in parts)
    size = rows * columns * ITEM
    assert crossing(atoms, mesh, partial, whole) == 2 * (prod(parts) - 1) * size


@given(factors)
def test_gathering_and_scattering_over_all_cuts_move_what_n_devices_must_receive(parts):
    atoms, mesh = ((prod(parts),), (3,)), _mesh(parts)
    cut, whole, partial = (" ".join(p for _ in parts) for p in (ROWS, "R", "P"))
    receive = (prod(parts) - 1) * prod(parts) * 3 * ITEM
    assert crossing(atoms, mesh, cut, whole) == receive
    assert crossing(atoms, mesh, partial, cut) == receive


@pytest.mark.parametrize("outer", [ROWS, "R", "P"])
@pytest.mark.parametrize(
    "src, dst", [(ROWS, COLUMNS), (COLUMNS, "R"), ("P", ROWS), ("P", "R"), ("R", ROWS)]
)
def test_a_second_cut_costs_in_every_group_what_it_costs_on_the_tensor_there(outer, src, dst):
    one_group = crossing((((16 if outer != ROWS else 8),), (24,)), "k2=2", src, dst)
    both = crossing(((16,), (24,)), "k1=2 k2=2", f"{outer} {src}", f"{outer} {dst}")
    assert both == 2 * one_group  # 2^(i-1) c_i for the second cut


def test_scalars_and_equal_layouts_cost_nothing():
    assert crossing((), "k1=2 k2=3", "P P", "R R") == 0
    assert crossing(((8,), (9,)), "k1=2 k2=3", "S(0) P", "S(0) P") == 0


def test_operators_and_updates_cost_nothing():
    measure, weight = Communication(Mesh.parse("k1=2")), Tensor("weight", (4,), "float32")
    assert measure.operator(None, np.ones((3, 5), np.int64)).tolist() == [0.0] * 5
    assert measure.update(np.array([4, 8]), "adamw", weight).tolist() == [0.0, 0.0]
