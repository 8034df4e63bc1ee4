"""Dropout in one kernel equals the operators one by one, in both passes and once more."""

import pytest
import torch

from shardwright.runtime.random import dropout as plain
from shardwright.runtime.random import fused_dropout
from shardwright.runtime.random.dropout import random_state
from tests.unit.runtime.random.test_dropout import CPU, dropout


def results(x, state, monkeypatch, fused):
    """The output, the gradient of a function of it, and the gradient's own gradient."""
    monkeypatch.setattr(plain, "is_fused", lambda _: fused)
    module = dropout(((7,), (33,)), probability=0.3, number=5)
    x = x.clone().requires_grad_()
    out = module(x, state)
    (first,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return out, first, second


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", [(3, 4), (3, 4, 10)])
def test_gradients_are_those_of_the_plain_operators(dtype, state, monkeypatch):
    monkeypatch.setattr(fused_dropout, "compiled", lambda: fused_dropout.dropped)
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    state = torch.tensor(state)
    one, other = (results(x, state, monkeypatch, fused) for fused in (True, False))
    assert all(map(torch.equal, one, other))
    assert 0 < (one[0] == 0).double().mean() < 0.6


def test_nothing_of_the_tensor_is_saved(monkeypatch):
    monkeypatch.setattr(fused_dropout, "compiled", lambda: fused_dropout.dropped)
    monkeypatch.setattr(plain, "is_fused", lambda _: True)
    saved = []
    x = torch.ones(7, 33, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(((7,), (33,)))(x, random_state(0, 0, CPU))
    assert max(tensor.numel() for tensor in saved) == 33  # keys of columns


def test_what_is_compiled_draws_the_same(monkeypatch):
    """Without its code generator, which `scripts.gpu_check` tries on a GPU."""
    kernel = torch.compile(fused_dropout.dropped, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(fused_dropout, "compiled", lambda: kernel)
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).bfloat16()
    one, other = (
        results(x, random_state(7, 3, CPU), monkeypatch, fused)[:2] for fused in (True, False)
    )
    assert all(map(torch.equal, one, other))


def test_the_cpu_and_compilers_take_the_plain_operators():
    assert not fused_dropout.is_fused(torch.ones(2))
