"""Tiles computed in chunks of rows equal the same part of the whole tensor, bit for bit."""

import pytest
import torch
from torch import nn

from shardwright.runtime.deferred import chunks, replay
from shardwright.runtime.deferred.ranges import narrowed, whole_of
from shardwright.runtime.deferred.sources import deferred, sources_of


def normal(weight):
    nn.init.normal_(weight, 0.5, 0.02)


def uniform(weight):
    nn.init.kaiming_uniform_(weight, a=5**0.5)


def scaled(weight):
    weight.normal_().mul_(0.02).add_(1).clamp_(0.9, 1.1)


def padded(weight):
    weight.normal_()
    weight[3].zero_()


def erfinv(weight):
    weight.uniform_(-0.9, 0.9).erfinv_().mul_(2**0.5)


def ones(weight):
    weight.fill_(1)


def made(init, shape, dtype):
    def make():
        model = nn.Module()
        model.before = nn.Parameter(torch.randn(7))
        model.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            init(model.weight)
        model.after = nn.Parameter(torch.randn(7))
        return model

    return make


INITS = [normal, uniform, scaled, padded, erfinv, ones]
SHAPES = [(33, 24), (33, 7), (40, 3, 5), (16, 1)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_equal_parts_of_the_whole(init, shape, dtype, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 1000)  # bytes
    monkeypatch.setattr(replay.Replay, "_executed", not_whole)
    torch.manual_seed(0)
    expected, state = made(init, shape, dtype)(), torch.get_rng_state()
    full = whole_of(shape)
    tiles = [full, ((16, shape[0]), *full[1:]), ((5, 6), *full[1:]), ((0, 9), *full[1:])]
    if shape[1] > 2:
        tiles.append(((2, 16), (1, 3), *full[2:]))
    for tile in tiles:
        torch.manual_seed(0)
        model = deferred(made(init, shape, dtype))
        sources = sources_of(model)
        found = sources.tile("weight", model.weight, tile)
        assert torch.equal(found, narrowed(expected.weight, tile))
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size()
        sources.finish()
        assert torch.equal(torch.get_rng_state(), state)


def not_whole(*_):
    raise AssertionError("the tensor was computed whole")


@pytest.mark.parametrize("count, row", [(100, 1), (7, 16), (9, 5), (3, 1000), (1, 3)])
def test_chunks_are_groups_of_16_elements_and_cover_all_rows(count, row, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 256)
    found = list(chunks._rows(count, row, 4))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(count))
    assert all((stop - start) * row % 16 == 0 for start, stop in found[:-1])
    assert len(found) == 1 or (found[-1][1] - found[-1][0]) * row >= 16
