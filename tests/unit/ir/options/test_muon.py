"""What is said of Muon is what torch's does."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shardwright.ir.options.muon import MUON
from tests.unit.ir.options.test_optimizers import Alive


class OnMatrices(TorchDispatchMode):
    """Operators that compute with whole matrices, which are in bfloat16."""

    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_large = any(isinstance(t, torch.Tensor) and t.numel() > 1 for t in tree_leaves(args))
        is_view = function is torch.ops.aten.permute.default
        self.calls += is_large and not is_view and getattr(result, "dtype", None) == torch.bfloat16
        return result


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
    with OnMatrices() as matrices:
        optimizer.step()
    assert matrices.calls == MUON.matrix.calls
    known = [p, p.grad, *(x for x in state.values() if isinstance(x, torch.Tensor))]
    with Alive(known) as alive:
        optimizer.step()
    assert alive.most == p.numel() + MUON.matrix.temporaries(6, 10)
