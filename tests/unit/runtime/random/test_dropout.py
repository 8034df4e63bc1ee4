"""Dropout masks: of a tile, the tile of the mask; as good as random; no two alike."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.graph import Op, Ref
from shardwright.ir.layout import REPLICATE, Layout, Mesh, Shard, atom_range, fits
from shardwright.program.instructions import Dropout
from shardwright.runtime.random.dropout import GlobalDropout, StepKeys, random_state
from tests.harness.simulated_ranks import gather, scatter
from tests.property.test_layout_laws import tensors
from tests.unit.runtime.graph_modules.test_fused_norms import Counted

CPU = torch.device("cpu")


def dropout(atoms, layout=None, rank=0, probability=0.5, number=0, keys=None):
    """The module of one rank, for a tensor of these atoms."""
    layout = layout or Layout.replicated(Mesh.parse("a=1"))
    at = layout.mesh.coordinate(rank)
    positions = tuple(
        tuple(
            (held.start, len(held), size)
            for a, size in enumerate(sizes)
            for held in [atom_range(size, (d, a), layout, at)]
        )
        for d, sizes in enumerate(atoms)
    )
    op = Op("y", "shardwright.dropout.default", (Ref("x"), probability, number), (), ("y",))
    return GlobalDropout(Dropout(op, positions), CPU, keys)


def masks(shape, probability=0.5, number=0, seed=0, step=0):
    """Which elements of a tensor of ones are kept."""
    module = dropout(tuple((n,) for n in shape), probability=probability, number=number)
    return module(torch.ones(shape), random_state(seed, step, CPU)) != 0


@given(tensors(partial=False), st.integers(0, 2**40), st.integers(0, 10**6))
def test_the_mask_of_a_tile_is_the_tile_of_the_mask(case, seed, step):
    atoms, _, layout = case
    shape = [torch.Size(sizes).numel() for sizes in atoms]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5
    state = random_state(seed, step, CPU)
    serial = dropout(atoms)(x, state)
    tiles = scatter(x, atoms, layout, None)
    dropped = [dropout(atoms, layout, rank)(tile, state) for rank, tile in enumerate(tiles)]
    assert torch.equal(gather(dropped, atoms, layout), serial)


@given(tensors(partial=False))
def test_how_a_dimension_is_cut_into_atoms_does_not_matter(case):
    """The mask depends on where an element is, and not on what the graph's other views say."""
    atoms, _, _ = case
    shape = tuple(torch.Size(sizes).numel() for sizes in atoms)
    x, state = torch.ones(shape), random_state(1, 2, CPU)
    assert torch.equal(dropout(atoms)(x, state) != 0, masks(shape, seed=1, step=2))


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("shape", [(10**6,), (1000, 1000), (10**6, 1), (1, 10**6), (50, 20, 1000)])
def test_as_many_are_kept_as_asked_for(shape, probability):
    count = 10**6
    sigma = (count * probability * (1 - probability)) ** 0.5
    for number in range(3):
        kept = masks(shape, probability, number).sum().item()
        assert abs(kept - count * (1 - probability)) < 4 * sigma


def test_what_is_kept_is_scaled_so_that_the_mean_stays():
    x = torch.full((3, 5), 2.0)
    out = dropout(((3,), (5,)), probability=0.2)(x, random_state(0, 0, CPU))
    assert set(out.flatten().tolist()) == {0.0, 2.5}
    assert out.dtype == x.dtype


@pytest.mark.parametrize("probability, value", [(0.0, 1.0), (1.0, 0.0)])
def test_the_extremes_keep_all_and_nothing(probability, value):
    out = dropout(((99,), (99,)), probability=probability)(
        torch.ones(99, 99), random_state(0, 0, CPU)
    )
    assert (out == value).all()


def test_masks_of_seeds_steps_and_operators_are_independent():
    """Of pairs of fair masks half of the elements agree, give or take four sigma."""
    shape = (500, 200)
    found = {
        (seed, step, number): masks(shape, number=number, seed=seed, step=step)
        for seed in (0, 1, 2**31)
        for step in (0, 1, 12345)
        for number in (0, 1, 17)
    }
    sigma = (10**5 / 4) ** 0.5
    for (one, a), (other, b) in combinations(found.items(), 2):
        agree = (a == b).sum().item()
        assert abs(agree - 10**5 / 2) < 4.5 * sigma, f"masks {one} and {other}"


def test_rows_and_columns_of_a_mask_are_independent():
    mask = masks((2000, 1024)).double() - 0.5
    for one in (mask, mask.T):
        signs = 2 * one
        for shift in (1, 2, 3, 8, 64, 512):
            correlation = (signs[shift:] * signs[:-shift]).mean().item()
            count = signs[shift:].numel()
            assert abs(correlation) < 4.5 / count**0.5, f"shift {shift}"
        means = signs.mean(1)
        expected = 1 / signs.shape[1] ** 0.5
        assert means.abs().max() < 5.5 * expected
        assert means.std().item() == pytest.approx(expected, rel=0.15)


def test_the_same_seed_and_step_draw_the_same_numbers_for_ever():
    """A resumed run must draw what it would have drawn: this mask may never change."""
    mask = masks((4, 16), seed=7, step=3, number=2)
    text = ["".join("x" if kept else "." for kept in row) for row in mask.tolist()]
    assert text == [
        "...xxx.xxxxx.x..",
        "xx.....x.....x.x",
        ".xx.x..xxx.xxxxx",
        "xxxxxxx....x..x.",
    ]


def test_in_eval_mode_nothing_is_dropped():
    module, x = dropout(((5,), (6,))).eval(), torch.rand(5, 6)
    assert torch.equal(module(x, random_state(0, 0, CPU)), x)


def test_gradients_pass_where_values_do():
    x = torch.rand(5, 6, requires_grad=True)
    out = dropout(((5,), (6,)), probability=0.3)(x, random_state(0, 0, CPU))
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)
    torch.testing.assert_close(x.grad[out != 0], torch.full_like(x.grad[out != 0], 1 / 0.7))


def test_tiles_may_have_gaps_between_their_atoms():
    """Heads in the middle of a fused dimension: a rank holds pieces of each of the three."""
    atoms, mesh = ((5,), (3, 4, 2)), Mesh.parse("tp=2")
    layout = Layout(mesh, (Shard(1, 1),))
    assert fits(atoms, layout) and layout.placements != (REPLICATE,)
    state, x = random_state(0, 0, CPU), torch.ones(5, 24)
    serial = dropout(atoms)(x, state).view(5, 3, 4, 2)
    tile = dropout(atoms, layout, rank=1)(torch.ones(5, 12), state)
    assert torch.equal(tile.view(5, 3, 2, 2), serial[:, :, 2:])


def test_the_keys_of_a_step_are_computed_once_for_all_operators():
    """A step on a GPU was bound by kernels of one element: thirty for each dropout."""
    keys, state = StepKeys(), random_state(3, 7, CPU)
    alone = [dropout(((64,),), number=number) for number in range(3)]
    shared = [dropout(((64,),), number=number, keys=keys) for number in range(3)]
    x = torch.ones(64)
    for step in (state, state + 1):
        for one, other in zip(alone, shared, strict=True):
            assert torch.equal(one(x, step), other(x, step))
    with Counted() as calls:
        shared[2](x, step)
    assert calls.names and len(calls.names) <= 26  # there were 60
