"""What kinds of devices trace differently has one form; what differs for a reason stays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.tracing.capture import capture_call


class Attention(nn.Module):
    def __init__(self, merge):
        super().__init__()
        self.merge = merge

    def forward(self, x):  # (batch, heads, length, width)
        return self.merge(F.scaled_dot_product_attention(x, x, x)).exp()


FLAT = torch.contiguous_format
MERGES = {
    "reshape": lambda y: y.transpose(1, 2).reshape(5, 7, -1),
    "contiguous": lambda y: y.transpose(1, 2).contiguous().view(5, 7, 12),
    "flatten": lambda y: y.permute(0, 2, 1, 3).flatten(2),
    "clone": lambda y: y.mT.mT.transpose(1, 2).clone(memory_format=FLAT).view(5, -1, 12),
}


@pytest.mark.parametrize("name", MERGES)
def test_heads_are_brought_together_without_a_copy_on_every_device(name):
    graphs = [
        capture_call(Attention(MERGES[name]), (torch.ones(5, 3, 7, 4, device=device),)).graph
        for device in ("cpu", "meta")
    ]
    kinds = [op.kind for op in graphs[0].ops]
    assert kinds[0] == "scaled_dot_product_attention"
    assert kinds[-2:] == ["view", "exp"]
    assert "clone" not in kinds
    assert graphs[0].ops[-2].args[1] == (5, 7, 12)


class Repeats(nn.Module):
    def forward(self, x):
        return x[:, None].expand(-1, 3, -1).reshape(-1, 4).exp()


def test_copies_that_are_made_everywhere_stay():
    graph = capture_call(Repeats(), (torch.ones(5, 4),)).graph
    assert [op.kind for op in graph.ops] == ["unsqueeze", "expand", "clone", "view", "exp"]
    assert [op.args[1] for op in graph.ops[1::2]] == [(5, 3, 4), (15, 4)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_returned_copy_is_what_it_copies(device):
    model = Attention(lambda y: y)
    model.forward = lambda x: F.scaled_dot_product_attention(x, x, x).clone()
    graph = capture_call(model, (torch.ones(5, 3, 7, 4, device=device),)).graph
    assert graph.outputs == ("scaled_dot_product_attention",)


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_full", "new_empty"])
def test_what_is_made_like_another_tensor_does_not_read_it(name):
    """Its dtype is all that is taken, so that a batch may be split and computed in parts."""
    value = (2.0,) if name == "new_full" else ()
    model = nn.Module()
    model.forward = lambda x: x.exp() + getattr(x.exp(), name)((5, 4), *value) * 0
    graph = capture_call(model, (torch.ones(5, 4, dtype=torch.float64),)).graph
    (made,) = (op for op in graph.ops if op.kind == name.removeprefix("new_"))
    assert made.operands == ()
    assert graph.tensor[made.outputs[0]].dtype == "float64"
    assert sum(op.kind == "exp" for op in graph.ops) == 1
