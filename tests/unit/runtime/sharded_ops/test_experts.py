"""Rows of experts: how often the host waits for the device to know how many there are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.program.lower.routing import Hop, Routing
from shardwright.runtime.sharded_ops.experts import (
    LocalExperts,
    _packed,
    _Tokens,
    summed,
)

aten = torch.ops.aten
# On CUDA these read a size on the host.
WAITS = {aten.bincount.default, aten.nonzero.default, aten._local_scalar_dense.default}


class Host(TorchDispatchMode):
    def __init__(self, monkeypatch):
        super().__init__()
        self.found = []
        was = torch.Tensor.tolist
        monkeypatch.setattr(
            torch.Tensor, "tolist", lambda x: (self.found.append("tolist"), was(x))[1]
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        repeats = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in WAITS or repeats:
            self.found.append(str(func))
        return func(*args, **kwargs)


class Twins:
    """Two peers, of which the other one has the same tokens as this one."""

    count = 2

    def gather(self, counts):
        return torch.stack([counts, counts])

    def send(self, parts, sent, received):
        return tuple(torch.cat([part[: received[0]], part[: received[1]]]) for part in parts)


def experts(split, hops):
    routing = Routing(0, 2, hops, split)
    return LocalExperts(routing, [Twins() for _ in hops], torch.device("cpu"))


# Each of these tokens has an expert here; the second one has both of its experts here.
CHOSEN = torch.tensor([[0, 2], [0, 1], [2, 0], [3, 1]])


def test_the_host_waits_once_for_a_tile(monkeypatch):
    halves = experts((0, 0, 1, 1), ())
    with Host(monkeypatch) as host:
        own = halves._own(CHOSEN)
        pairs = halves._load(own, CHOSEN)
        expert, order = halves._sorted(own, pairs)
    assert host.found == ["tolist"]
    assert own.tolist() == [[0, -1], [0, 1], [-1, 0], [-1, 1]]
    assert expert.tolist() == [0, 0, 0, 1, 1]
    assert CHOSEN.reshape(-1)[order].tolist() == expert.tolist()
    assert halves.skew.most == 5 / 4


def test_the_host_waits_once_for_an_exchange_and_a_token_goes_once_to_a_peer(monkeypatch):
    owners = (0, 0, 1, 1)
    hopping = experts((0, 0, 0, 0), (Hop("ep", owners, is_last=True),))
    given = _Tokens(torch.randn(4, 3), CHOSEN, torch.rand(4, 2))
    with Host(monkeypatch) as host:
        came, pairs, back = hopping._hop(given, hopping.peers[0], hopping._hops[0], torch.float64)
    assert host.found == ["tolist"]
    # Four tokens have experts here and come from both peers; three of them have some elsewhere.
    assert len(came.rows) == 8 and pairs == 10
    assert came.chosen[:4].tolist() == [[0, -1], [0, 1], [-1, 0], [-1, 1]]
    assert torch.equal(came.rows[:4], given.rows) and torch.equal(came.scores[:4], given.scores)
    results = back(came.rows)
    assert results.dtype == torch.float64 and results.shape == (4, 3)


def test_sums_are_of_rows_that_belong_together_and_so_are_gradients():
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    of, lengths = torch.tensor([2, 0, 2, 3, 0]), torch.tensor([2, 0, 2, 1])
    expected = torch.zeros(4, 3, dtype=torch.float64).index_add(0, of, rows.detach())
    torch.testing.assert_close(summed(rows, of, lengths), expected)
    assert torch.autograd.gradcheck(lambda x: summed(x, of, lengths), rows)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_parts_of_a_message_come_out_as_they_went_in(dtype):
    parts = (
        torch.randn(4, 3).to(dtype),
        torch.arange(-4, 8, dtype=torch.int32).view(4, 3),
        torch.rand(4, 1),
    )
    message, unpacked = _packed(parts)
    assert message.dtype == torch.uint8 and message.is_contiguous()
    for part, found in zip(parts, unpacked(message.clone()), strict=True):
        assert found.dtype == part.dtype and torch.equal(found, part)
