"""Rows of experts: how often the host waits for the device to know how many there are."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.program.lower.routing import Routing
from shardwright.runtime.sharded_ops.experts import LocalExperts

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
    """Two peers, of which the other one has the same rows as this one."""

    count = 2

    def gather(self, counts):
        return torch.stack([counts, counts])

    def send(self, rows, sent, received):
        return torch.cat([rows[: received[0]], rows[: received[1]]])


def experts(split, hops):
    routing = Routing(0, 2, hops, split)
    return LocalExperts(routing, [Twins() for _ in hops], torch.device("cpu"))


def test_the_host_waits_once_for_each_exchange_and_once_for_a_tile(monkeypatch):
    chosen = torch.tensor([[0, 2], [1, 3], [2, 0], [3, 1]])
    rows = torch.randn(8, 3)
    halves = experts((0, 0, 1, 1), ())
    with Host(monkeypatch) as host:
        order, expert = halves._own(chosen.reshape(-1))
    assert host.found == ["tolist"]
    assert expert.tolist() == [0, 0, 1, 1]
    assert chosen.reshape(-1)[order].tolist() == [0, 0, 1, 1]
    hopping = experts((0, 0, 0, 0), (("ep", (0, 0, 1, 1)),))
    owner, mine = hopping._hops[0]
    sorted_experts = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    with Host(monkeypatch) as host:
        (arrived, scores), whose, back = hopping._hop(
            [rows, rows[:, :1]], sorted_experts, hopping.peers[0], owner, mine
        )
    assert host.found == ["tolist"]
    assert whose.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert back(arrived).shape == rows.shape
    assert torch.equal(scores, arrived[:, :1])
