"""What is said of Muon is what torch's does."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.ir.options.muon import MUON


def test_the_update_of_muon_is_that_of_torch():
    p = nn.Parameter(torch.randn(6, 10))
    optimizer = torch.optim.Muon([p])
    p.grad = torch.randn(6, 10)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert counted.get_total_flops() == MUON.matrix.flop(6, 10) == MUON.matrix.flop(10, 6)
    (state,) = optimizer.state.values()
    assert [x.shape for x in state.values() if x.numel() > 1] == [p.shape] * MUON.tensors_of(
        p.shape
    )
    assert MUON.tensors_of((6,)) == 2
