import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Mesh,
    Partial,
    Shard,
    fits,
    is_natural,
    largest_atoms,
    num_elements,
)
from shardwright.planner.tables.layout_codes import (
    MOST_AXES,
    decode,
    digits,
    duals,
    encode,
    joined,
    layouts_of,
    local_elements,
    storable,
)

MESH = Mesh.parse("dp=2 tp=3")
ATOMS = ((7, 12), (), (33,))
placements = st.sampled_from([REPLICATE, PARTIAL, Shard(0), Shard(0, 1), Shard(2)])
layouts = st.tuples(placements, placements).map(lambda both: Layout(MESH, both))


@given(layouts)
def test_a_code_names_one_layout(layout):
    code = encode(layout, ATOMS)
    assert decode(code, ATOMS, MESH) == layout
    assert joined(digits(np.array([code]), 2)).tolist() == [code]


@given(layouts)
def test_codes_know_duals_and_tiles(layout):
    code = np.array([encode(layout, ATOMS)])
    assert decode(int(duals(code, 2)[0]), ATOMS, MESH) == layout.dual()
    elements = local_elements(digits(code, 2), ATOMS, MESH)
    assert elements.tolist() == [num_elements(largest_atoms(ATOMS, layout))]


def test_a_code_holds_the_digits_of_ten_axes_of_the_most_atoms():
    mesh = Mesh(tuple((f"k{i}", 2) for i in range(MOST_AXES)))
    atoms = ((2,) * 62,)  # the elements of a tensor are counted in 64 bits
    last = Layout(mesh, tuple(Shard(0, 61) for _ in mesh.axes))
    code = encode(last, atoms)
    assert np.array([code]).dtype == np.int64
    assert digits(np.array([code]), MOST_AXES).tolist() == [[63] * MOST_AXES]
    assert decode(code, atoms, mesh) == last


def test_every_layout_that_fits_is_listed_once():
    every = [
        Layout(MESH, (a, b))
        for b in (REPLICATE, PARTIAL, Shard(0), Shard(0, 1))
        for a in (REPLICATE, PARTIAL, Shard(0), Shard(0, 1))
    ]
    atoms = ((4, 2),)  # 4 over 2 and 3 leaves a device nothing, and so does 2 over 3
    found = [decode(code, atoms, MESH) for code in layouts_of(atoms, MESH).tolist()]
    assert found[0] == Layout.replicated(MESH)
    assert len(found) == len(set(found)) and set(found) == {x for x in every if fits(atoms, x)}
    stored = {decode(code, atoms, MESH) for code in storable(atoms, MESH).tolist()}
    only = [{0, 2}, {3}]  # the first axis replicates or shards the 4, the second shards the 2
    assert storable(atoms, MESH, only).size == 0  # which is too short for three
    only = [{0, 2}, {0, 1}]
    left = [decode(code, atoms, MESH) for code in storable(atoms, MESH, only).tolist()]
    assert left == [Layout.replicated(MESH), Layout(MESH, (Shard(0), REPLICATE))]
    whole = {x for x in found if not any(isinstance(p, Partial) for p in x.placements)}
    assert stored == {x for x in whole if is_natural(atoms, x)} and len(stored) == len(whole) - 1
