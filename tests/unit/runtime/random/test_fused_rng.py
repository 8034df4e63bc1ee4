"""torch's own random kernels, seeded by tile: as good as random, equal on replicas, repeatable."""

from itertools import combinations

import pytest
import torch

from shardwright.ir.graph import Op, Ref
from shardwright.ir.layout import Layout, Mesh, Shard, atom_range
from shardwright.program.instructions import Attention, Dropout
from shardwright.runtime.random.dropout import GlobalAttention, random_state
from shardwright.runtime.random.fused_rng import FastAttention, FastDropout
from tests.harness.simulated_ranks import gather, scatter

CPU = torch.device("cpu")
SHAPE = (500, 200)


def positions(atoms, layout=None, rank=0):
    layout = layout or Layout.replicated(Mesh.parse("a=1"))
    at = layout.mesh.coordinate(rank)
    return tuple(
        tuple(
            (held.start, len(held), size)
            for a, size in enumerate(sizes)
            for held in [atom_range(size, (d, a), layout, at)]
        )
        for d, sizes in enumerate(atoms)
    )


def dropout(where, probability=0.5, number=0):
    op = Op("y", "shardwright.dropout.default", (Ref("x"), probability, number), (), ("y",))
    return FastDropout(Dropout(op, where), CPU)


def mask(where=None, probability=0.5, number=0, seed=0, step=0, shape=SHAPE):
    where = where or positions(tuple((n,) for n in shape))
    return dropout(where, probability, number)(torch.ones(shape), random_state(seed, step, CPU)) > 0


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_asked_for(probability):
    count = SHAPE[0] * SHAPE[1]
    sigma = (count * probability * (1 - probability)) ** 0.5
    for number in range(3):
        kept = mask(probability=probability, number=number).sum().item()
        assert abs(kept - count * (1 - probability)) < 4 * sigma


def test_masks_of_seeds_steps_operators_and_tiles_are_independent():
    """Of pairs of fair masks half of the elements agree, give or take four sigma."""
    split = Layout(Mesh.parse("dp=2 tp=2"), (Shard(0, 0), Shard(1, 0)))
    tiles = [positions(((1000,), (400,)), split, rank) for rank in range(4)]
    found = {
        (seed, step, number, tile): mask(tiles[tile], number=number, seed=seed, step=step)
        for seed in (0, 1, 2**31)
        for step in (0, 1, 12345)
        for number in (0, 17)
        for tile in range(4)
    }
    sigma = (10**5 / 4) ** 0.5
    for (one, a), (other, b) in combinations(found.items(), 2):
        agree = (a == b).sum().item()
        assert abs(agree - 10**5 / 2) < 4.75 * sigma, f"masks {one} and {other}"


def test_replicas_of_a_tile_draw_the_same_and_again_the_same():
    """The batch is split over dp, and replicated over tp: ranks 0 and 1 hold one tile."""
    layout = Layout(Mesh.parse("dp=2 tp=2"), (Shard(0, 0), Layout.replicated(Mesh.parse("a=1"))
        .placements[0]))  # fmt: skip
    drawn = [mask(positions(((1000,), (200,)), layout, rank), seed=3, step=5) for rank in range(4)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    assert not torch.equal(drawn[0], drawn[2])
    again = [mask(positions(((1000,), (200,)), layout, rank), seed=3, step=5) for rank in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_the_users_own_random_numbers_are_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    mask()
    assert torch.equal(torch.rand(5), expected)


def test_what_is_kept_is_scaled_and_gradients_pass_there():
    x = torch.full((30, 50), 2.0, requires_grad=True)
    module = dropout(positions(((30,), (50,))), probability=0.2)
    out = module(x, random_state(0, 0, CPU))
    assert set(out.flatten().tolist()) == {0.0, 2.5}
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0)
    assert torch.equal(module.eval()(x, random_state(0, 0, CPU)), x)


def attention(kind, where, probability=0.25, causal=False, grouped=False, mask=False):
    operands = (Ref("q"), Ref("k"), Ref("v"), Ref("m") if mask else None, probability, causal)
    kwargs = (("enable_gqa", True),) if grouped else ()
    op = Op("y", "aten.scaled_dot_product_attention.default", operands, kwargs, ("y",))
    return kind(Attention(op, 9, where), CPU)


SCORES = ((6,), (4,), (50,), (40,))  # batch, heads, queries, keys


def weights(where=None, probability=0.25, **state):
    """What is left of equal weights: attention over an identity with queries of zero."""
    q, k = torch.zeros(6, 4, 50, 8), torch.zeros(6, 4, 40, 8)
    v = torch.eye(40).expand(6, 4, 40, 40)
    module = attention(FastAttention, where or positions(SCORES), probability)
    return module(q, k, v, random_state(state.get("seed", 0), state.get("step", 0), CPU))


def test_fused_attention_drops_as_many_weights_as_asked_for():
    left = weights()
    kept = left > 0
    torch.testing.assert_close(left[kept], torch.full_like(left[kept], 1 / 40 / 0.75))
    count = left.numel()
    assert abs(kept.sum().item() - 0.75 * count) < 4 * (count * 0.75 * 0.25) ** 0.5
    assert torch.equal(weights(), left)
    assert not torch.equal(weights(step=1), left) and not torch.equal(weights(seed=1), left)
    other = positions(SCORES, Layout(Mesh.parse("tp=2"), (Shard(1, 0),)), rank=1)
    assert not torch.equal(weights(other), left)


def test_fused_attention_in_eval_mode_drops_nothing():
    q, k, v = torch.randn(3, 2, 5, 7, 8).unbind()
    module = attention(FastAttention, positions(((2,), (5,), (7,), (7,))), causal=True).eval()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(module(q, k, v, random_state(0, 0, CPU)), expected)


# Queries of a causal attention with dropout are not split: its rule keeps them together.
@pytest.mark.parametrize(
    "form, dim",
    [(f, d) for f in ("plain", "grouped", "masked") for d in range(3)]
    + [("causal", 0), ("causal", 1)],
)
def test_attention_that_verify_runs_drops_the_same_whatever_the_tile(form, dim):
    """Split over the batch, the heads or the queries: pieces of one and the same result."""
    torch.manual_seed(0)
    heads = 2 if form == "grouped" else 4
    q = torch.randn(3, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, heads, 6, 8, dtype=torch.float64) for _ in range(2))
    given = [torch.randn(5, 6, dtype=torch.float64) > 0] if form == "masked" else []
    options = {"causal": form == "causal", "grouped": form == "grouped", "mask": form == "masked"}
    state = random_state(1, 2, CPU)
    atoms = ((3,), (4,), (5,), (6,))
    whole = attention(GlobalAttention, positions(atoms), **options)
    serial = whole(q, k, v, *given, state)
    layout = Layout(Mesh.parse("tp=2"), (Shard(dim, 0),))
    tiles = {
        "q": scatter(q, ((3,), (4,), (5,), (8,)), layout, None),
        "k": [k, k] if dim == 2 else list(k.split(_sizes(k, dim), dim)),
        "v": [v, v] if dim == 2 else list(v.split(_sizes(v, dim), dim)),
    }
    found = []
    for rank in range(2):
        module = attention(GlobalAttention, positions(atoms, layout, rank), **options)
        part = [m.split(_sizes(m, 0), 0)[rank] if dim == 2 else m for m in given]
        found.append(module(*(tiles[name][rank] for name in "qkv"), *part, state))
    torch.testing.assert_close(gather(found, ((3,), (4,), (5,), (8,)), layout), serial)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, *given, is_causal=options["causal"], enable_gqa=options["grouped"]
    )
    torch.testing.assert_close(whole.eval()(q, k, v, *given, state), expected)


def _sizes(x, dim):
    half = (x.shape[dim] + 1) // 2
    return [half, x.shape[dim] - half]
