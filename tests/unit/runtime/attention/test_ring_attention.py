"""Attention that devices share, on threads that stand for them: exact, in blocks of any size."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from shardwright.ir.graph import Op, Ref
from shardwright.ir.layout import Mesh
from shardwright.program.instructions import SharedAttention
from shardwright.runtime.attention import blockwise_attention
from shardwright.runtime.attention.ring_attention import TiledAttention
from tests.harness.rank_threads import Meeting

LENGTH = 23


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


def shared(given, runs, *, causal=False, ring=True, scale=None, grouped=False):
    """What devices that hold these runs of queries, and of keys, return together."""
    names = ("q", "k", "v", "m")[: len(given)]
    args = (*map(Ref, names[:3]), Ref("m") if len(given) > 3 else None, 0.0, causal)
    kwargs = (("scale", scale), ("enable_gqa", grouped))
    op = Op("y", "aten.scaled_dot_product_attention.default", args, kwargs, ("y",))
    meeting = Meeting(Mesh.parse(f"a={len(runs)}"))

    def rank(place):
        one = SharedAttention(op, "a", place, runs, runs if ring else ())
        here = rows_of(runs[place])
        query, key, value, *mask = given
        tiles = [query[..., here, :], *(x[..., here, :] if ring else x for x in (key, value))]
        tiles += [m[..., here, :] if m.shape[-2] > 1 else m for m in mask]
        tiles = [t.detach().requires_grad_(t.requires_grad) for t in tiles]
        made = TiledAttention(one, meeting.line(place, "a"))(*tiles)
        made.backward(weights(made.shape[-1], given)[..., here, :].to(made.dtype))
        return [made.detach(), *(t.grad for t in tiles)]

    return meeting.run(rank)


def weights(width, given):
    shape = (*given[0].shape[:-1], width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows_of(runs):
    return torch.cat([torch.arange(start, start + length) for start, length in runs])


def together(parts, runs, *, ring=True):
    """Result and gradients of the whole: rows in order, or sums where everyone has all."""
    result, query, key, value, *mask = zip(*parts, strict=True)
    order = torch.cat([rows_of(one) for one in runs]).argsort()

    def rows(tiles):
        return torch.cat(tiles, -2)[..., order, :]

    join = rows if ring else sum
    return [rows(result), rows(query), join(key), join(value), *mask]


# Blocks of sixteen rows, large ones, and (for values as wide as keys) torch's fused kernels.
@pytest.mark.parametrize(("scores", "width"), [(40, 5), (2**20, 5), (2**20, 4)])
@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize(
    "runs",
    [
        (((0, 6), (18, 5)), ((6, 6), (12, 6))),
        (((0, 4), (20, 3)), ((4, 4), (16, 4)), ((8, 8),)),
        (((0, 22),), ((22, 1),)),
    ],
)
def test_causal_queries_in_halves_see_what_they_would_together(
    runs, ring, scores, width, monkeypatch
):
    monkeypatch.setattr(blockwise_attention, "_SCORES", scores)
    given = tensors((2, 6, LENGTH, 4), (2, 3, LENGTH, 4), (2, 3, LENGTH, width))
    expected = scaled_dot_product_attention(*given, is_causal=True, scale=0.3, enable_gqa=True)
    expected.backward(weights(width, given))
    parts = shared(given, runs, causal=True, ring=ring, scale=0.3, grouped=True)
    found = together(parts, runs, ring=ring)
    for one, other in zip(found, [expected.detach(), *(x.grad for x in given)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, LENGTH])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_stays_with_its_queries(rows, boolean):
    given = tensors((2, 4, LENGTH, 4), (2, 2, LENGTH, 4), (2, 2, LENGTH, 4), (2, 1, rows, LENGTH))
    if boolean:
        given[3] = given[3].detach() > -0.5
        given[3][1, 0, rows - 1] = False  # this row, or each, sees nothing
    expected = scaled_dot_product_attention(*given[:3], given[3], enable_gqa=True)
    expected.backward(weights(4, given))
    runs = (((0, 9),), ((9, 9),), ((18, 5),))
    *found, mask = together(shared(given, runs, grouped=True), runs)
    for one, other in zip(found, [expected.detach(), *(x.grad for x in given[:3])], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    if not boolean:
        whole = torch.cat(mask, -2) if rows > 1 else sum(mask)
        torch.testing.assert_close(whole, given[3].grad, rtol=1e-12, atol=1e-12)


def test_half_precision_sums_in_single():
    exact = tensors((1, 2, 64, 8), (1, 2, 64, 8), (1, 2, 64, 8))
    given = [x.detach().bfloat16().requires_grad_() for x in exact]
    made = [x.detach().double().requires_grad_() for x in given]
    expected = scaled_dot_product_attention(*made, is_causal=True)
    expected.backward(weights(8, made))
    runs = (((0, 16), (48, 16)), ((16, 32),))
    found = together(shared(given, runs, causal=True), runs)
    for one, other in zip(found, [expected.detach(), *(x.grad for x in made)], strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, rtol=0.03, atol=0.03)
