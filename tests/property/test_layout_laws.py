"""Laws of layouts: text, tiles, and redistribution, which there and back is the identity (10)."""

from dataclasses import replace
from itertools import product
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Shard,
    atom_range,
    atom_runs,
    chunk,
    fits,
    is_natural,
    largest_atoms,
    local_atoms,
    num_elements,
    parse_placement,
    shape_of,
    with_atoms,
)
from shardwright.ir.redistribution import Collective, steps_between
from shardwright.program.instructions import flat, moves
from tests.harness.simulated_ranks import cut, gather, join, scatter

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,3}", fullmatch=True)
meshes = st.lists(
    st.tuples(names, st.integers(1, 3)), min_size=1, max_size=3, unique_by=lambda axis: axis[0]
).map(lambda axes: Mesh(tuple(axes)))
shards = st.builds(Shard, st.integers(0, 2), st.integers(0, 2), st.booleans())
placements = st.just(REPLICATE) | st.just(PARTIAL) | shards
sizes = st.integers(2, 9)
atoms_of_tensors = st.lists(st.lists(sizes, max_size=2).map(tuple), min_size=1, max_size=3).map(
    tuple
)


@st.composite
def layouts(draw, mesh, atoms=None, partial=True, zigzag=False):
    """Any layout on `mesh`; with `atoms`, one that fits a tensor of these."""
    if atoms is None:
        return Layout(mesh, tuple(draw(placements) for _ in mesh.axes))
    orders = (False, True) if zigzag else (False,)
    there = [
        Shard(d, a, order)
        for d, dim in enumerate(atoms)
        for a in range(len(dim))
        for order in orders
    ]
    found = Layout.replicated(mesh)
    for axis in range(len(mesh.axes)):
        choice = draw(st.sampled_from([REPLICATE, *([PARTIAL] if partial else []), *there]))
        tried = (*found.placements[:axis], choice, *found.placements[axis + 1 :])
        if fits(atoms, Layout(mesh, tried)):
            found = Layout(mesh, tried)
    return found


@st.composite
def tensors(draw, count=1, partial=True, zigzag=False):
    """Atoms, a mesh and `count` layouts of a tensor on it."""
    atoms, mesh = draw(atoms_of_tensors), draw(meshes)
    return atoms, mesh, *(draw(layouts(mesh, atoms, partial, zigzag)) for _ in range(count))


# Text


@given(placements)
def test_placements_print_as_they_are_read(placement):
    assert parse_placement(str(placement)) == placement


@given(meshes)
def test_meshes_print_as_they_are_read(mesh):
    assert Mesh.parse(str(mesh)) == mesh


@given(meshes.flatmap(layouts))
def test_layouts_print_as_they_are_read(layout):
    assert Layout.parse(str(layout), layout.mesh) == layout


@given(st.text(max_size=12))
def test_other_text_is_refused_by_a_layout_error(text):
    mesh = Mesh.parse("dp=2 tp=2")
    for read in (parse_placement, Mesh.parse, lambda text: Layout.parse(text, mesh)):
        try:
            found = read(text)
        except LayoutError:
            continue
        assert read(str(found)) == found


# Tiles


@given(meshes)
def test_ranks_and_coordinates_correspond(mesh):
    expected = list(product(*(range(size) for size in mesh.shape)))
    assert [mesh.coordinate(rank) for rank in range(mesh.size)] == expected


@given(st.integers(1, 40), st.integers(1, 12))
def test_chunks_are_those_of_torch(size, parts):
    found = [chunk(size, parts, index) for index in range(parts)]
    tiles = [list(range(start, start + length)) for start, length in found]
    assert [tile for tile in tiles if tile] == [t.tolist() for t in torch.arange(size).chunk(parts)]


@given(tensors())
def test_tiles_cover_every_element_as_often_as_it_is_replicated(case):
    atoms, mesh, layout = case
    copies = prod(
        size
        for size, placement in zip(mesh.shape, layout.placements, strict=True)
        if not isinstance(placement, Shard)
    )
    counts = torch.zeros(flat(atoms), dtype=torch.int64)
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        tile = counts
        for dim, (d, a) in enumerate((d, a) for d, s in enumerate(atoms) for a in range(len(s))):
            held = atom_range(atoms[d][a], (d, a), layout, at)
            assert len(held) == local_atoms(atoms, layout, at)[d][a]
            tile = tile.narrow(dim, held.start, len(held))
        tile += 1
        assert tile.numel() == num_elements(local_atoms(atoms, layout, at))
    assert (counts == copies).all()


@given(tensors())
def test_the_first_tile_is_the_largest(case):
    atoms, mesh, layout = case
    tiles = [local_atoms(atoms, layout, mesh.coordinate(rank)) for rank in range(mesh.size)]
    assert shape_of(largest_atoms(atoms, layout)) == tuple(
        map(max, zip(*map(shape_of, tiles), strict=True))
    )


@given(atoms_of_tensors, meshes, st.data())
def test_a_layout_fits_if_it_names_atoms_and_no_tile_is_empty(atoms, mesh, data):
    layout = data.draw(layouts(mesh))
    there = all(
        not isinstance(p, Shard) or (p.dim < len(atoms) and p.atom < len(atoms[p.dim]))
        for p in layout.placements
    )
    full = there and all(
        num_elements(local_atoms(atoms, layout, mesh.coordinate(rank))) > 0
        for rank in range(mesh.size)
    )
    assert fits(atoms, layout) == full


@given(tensors(zigzag=True))
def test_runs_are_the_rows_of_a_tile_in_its_order(case):
    atoms, mesh, layout = case
    for d, dim in enumerate(atoms):
        for a, size in enumerate(dim):
            rows = torch.arange(size)
            only = [p if _cuts(p, d, a) else REPLICATE for p in layout.placements]
            only = [replace(p, dim=0, atom=0) if p != REPLICATE else p for p in only]
            tiles = scatter(rows, ((size,),), Layout(mesh, tuple(only)), None)
            for rank, tile in enumerate(tiles):
                runs = atom_runs(size, (d, a), layout, mesh.coordinate(rank))
                assert [i for start, n in runs for i in range(start, start + n)] == tile.tolist()
                assert local_atoms(atoms, layout, mesh.coordinate(rank))[d][a] == len(tile)


def _cuts(placement, dim, atom):
    return isinstance(placement, Shard) and (placement.dim, placement.atom) == (dim, atom)


@given(meshes.flatmap(layouts))
def test_a_gradient_is_wanted_whole_where_its_tensor_is_partial(layout):
    dual = layout.dual()
    assert dual.dual() == dual
    for placement, wanted in zip(layout.placements, dual.placements, strict=True):
        assert wanted == (REPLICATE if isinstance(placement, Partial) else placement)


# Redistribution


@given(tensors(2, zigzag=True))
def test_steps_are_legal_and_lead_from_source_to_destination(case):
    _, _, src, dst = case
    now = list(src.placements)
    for step in steps_between(src, dst):
        assert now[step.axis] == step.src != step.dst
        inside = [p.contiguous for p in now[step.axis + 1 :] if isinstance(p, Shard)]
        for held in (step.src, step.dst):
            if isinstance(held, Shard):
                assert held.contiguous not in inside, "an inner axis cuts this atom"
        now[step.axis] = step.dst
    assert tuple(now) == dst.placements


@given(tensors())
def test_nothing_is_done_where_nothing_changes(case):
    _, _, layout = case
    assert steps_between(layout, layout) == ()


@given(tensors(2, zigzag=True))
def test_moves_bring_every_tile_to_its_place(case):
    atoms, _, src, dst = case
    x = torch.arange(num_elements(atoms)).reshape(shape_of(atoms)).double()
    tiles = run_moves(scatter(x, atoms, src, torch.Generator()), atoms, src, dst)
    torch.testing.assert_close(gather(tiles, atoms, dst), x)


@given(tensors(2, partial=False, zigzag=True))
def test_there_and_back_is_the_identity(case):
    atoms, _, src, dst = case
    x = torch.arange(num_elements(atoms)).reshape(shape_of(atoms))
    before = scatter(x, atoms, src, None)
    after = run_moves(run_moves(before, atoms, src, dst), atoms, dst, src)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@given(tensors(2, zigzag=True))
def test_only_steps_that_move_no_data_need_no_other_rank(case):
    _, _, src, dst = case
    for step in steps_between(src, dst):
        local = step.src == REPLICATE or isinstance(step.dst, Partial)
        assert step.collective.moves_data == (not local)


def run_moves(tiles, atoms, src, dst):
    """What the ranks do, each with its own numbers, one step after the other."""
    mesh = src.mesh
    ranks = [mesh.coordinate(rank) for rank in range(mesh.size)]
    plans = [moves(atoms, src, dst, at) for at in ranks]
    tiles = [
        tile.reshape(flat(local_atoms(atoms, src, at)))
        for tile, at in zip(tiles, ranks, strict=True)
    ]
    for step, now in enumerate(zip(*plans, strict=True)):
        assert len({(move.axis, move.collective, move.src, move.dst) for move in now}) == 1
        axis = mesh.names.index(now[0].axis)
        tiles = [
            run_move(now[rank], at[axis], [tiles[i] for i in peers(mesh, at, axis)])
            for rank, at in enumerate(ranks)
        ]
        assert step < 5 * len(mesh.axes)
    return [
        tile.reshape(shape_of(local_atoms(atoms, dst, at)))
        for tile, at in zip(tiles, ranks, strict=True)
    ]


def peers(mesh, at, axis):
    """Ranks that differ from `at` in their position on `axis` alone, in order."""
    line = [(*at[:axis], i, *at[axis + 1 :]) for i in range(mesh.shape[axis])]
    everyone = [mesh.coordinate(rank) for rank in range(mesh.size)]
    return [everyone.index(one) for one in line]


def run_move(move, index, line):
    """One rank's new tile, given the old tiles of all ranks of its line."""
    ways, mine = len(line), line[index]
    match move.collective:
        case Collective.SLICE:
            assert mine.shape == move.whole
            if move.halves:
                return torch.cat([mine.narrow(move.dst, *run) for run in move.halves], move.dst)
            return mine.narrow(move.dst, move.start, move.length)
        case Collective.MASK:
            return mine if move.keeps else torch.zeros_like(mine)
        case Collective.EMBED:
            whole = torch.zeros(move.whole, dtype=mine.dtype)
            whole.narrow(move.src, move.start, move.length).copy_(mine)
            return whole
        case Collective.ALL_REDUCE:
            whole = torch.stack(line).sum(0)
        case Collective.ALL_GATHER:
            whole = torch.cat(line, move.src)
        case Collective.REDUCE_SCATTER:
            whole = torch.stack(line).sum(0)
        case Collective.ALL_TO_ALL:
            whole = torch.cat(line, move.src)
        case Collective.SWAP:
            return cut(torch.cat(line, move.src), Shard(0, zigzag=True), ways, move.src)[index]
        case Collective.SWAP_BACK:
            whole = join(line, Shard(0, zigzag=True), move.src)
    assert whole.shape == move.whole
    if move.dst < 0:
        return whole
    tiles = whole.chunk(ways, move.dst)
    empty = whole.narrow(move.dst, 0, 0)
    return tiles[index] if index < len(tiles) else empty


@given(tensors(partial=False))
def test_natural_layouts_have_the_tiles_of_torch_chunk(given_tensor):
    """Dimension by dimension, axis by axis, as DTensor does: then parameters have their shape.

    Others have others, but for uneven tiles that happen to be the same.
    """
    atoms, mesh, layout = given_tensor
    whole = torch.arange(num_elements(atoms)).view(shape_of(atoms))
    alike, lengths = True, set()
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        mine = whole
        for placement, parts, index in zip(layout.placements, mesh.shape, at, strict=True):
            if isinstance(placement, Shard):
                tiles = mine.chunk(parts, placement.dim)
                mine = tiles[index] if index < len(tiles) else mine[:0]
        tile = whole.reshape(flat(atoms))
        for i, (d, a) in enumerate((d, a) for d, dim in enumerate(atoms) for a in range(len(dim))):
            held = atom_range(atoms[d][a], (d, a), layout, at)
            tile = tile.narrow(i, held.start, len(held))
        alike &= torch.equal(mine.flatten(), tile.flatten())
        lengths.add(tile.numel())
    if len(lengths) == 1:
        assert is_natural(atoms, layout) == alike
    if is_natural(atoms, layout):
        assert alike
        joined = tuple((size,) if size > 1 else () for size in shape_of(atoms))
        plain = with_atoms(layout, joined)
        assert [getattr(p, "dim", None) for p in plain.placements] == [
            getattr(p, "dim", None) for p in layout.placements
        ]
        assert is_natural(joined, plain) and is_natural(atoms, with_atoms(plain, atoms))
