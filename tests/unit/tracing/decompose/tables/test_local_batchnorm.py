"""Batch norm of the part of a batch at hand equals torch's on that part."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.options.numerics import NumericsError
from shardwright.ir.plan import Phase
from shardwright.report.text.explain import explain
from shardwright.tracing.decompose.tables.local_batchnorm import local_batch_norm


def numbers(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_part_is_torchs_batch_norm(affine, dtype):
    x = numbers(6, 3, 4, dtype=dtype)
    low = dtype == torch.bfloat16
    kept = torch.float32 if low else dtype
    weight, bias = numbers(2, 3, dtype=kept).unbind() if affine else (None, None)
    mean, variance = torch.zeros(2, 3, dtype=kept).unbind()
    expected = F.batch_norm(x, mean, variance, weight, bias, training=True, momentum=1.0, eps=1e-3)
    out, _, _, statistics = local_batch_norm(x, weight, bias, 0.5, 1e-3, [])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(statistics, 0.5 * torch.stack([mean, variance]))


def test_each_part_has_its_own_statistics():
    x, (weight, bias) = numbers(6, 3, 4), numbers(2, 3).unbind()
    parts = [4, 0, 4, 0, 0, 4]
    out, _, _, statistics = local_batch_norm(x, weight, bias, 1.0, 1e-3, parts)
    expected, mean = torch.empty_like(x), torch.zeros(3).double()
    for part in (0, 4):
        rows = torch.tensor(parts) == part
        expected[rows] = F.batch_norm(x[rows], None, None, weight, bias, training=True, eps=1e-3)
        mean += x[rows].mean((0, 2)) / 2
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(statistics[0], mean)


@pytest.mark.parametrize("parts", [[], [0, 1, 0, 1, 1]])
def test_gradients_are_right(parts):
    given = [t.requires_grad_() for t in (numbers(5, 2, 3), numbers(2), numbers(2) + 1)]
    assert torch.autograd.gradcheck(
        lambda *operands: local_batch_norm(*operands, 1.0, 1e-3, parts)[0], given
    )


def test_one_value_per_channel_has_no_variance():
    with pytest.raises(ValueError, match=r"one value per channel in a part of 1 .* take a larger"):
        local_batch_norm(numbers(2, 3), None, None, 1.0, 1e-3, [0, 1])


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.layer(x)).square().sin().sum()


def test_a_graph_says_which_statistics_it_takes():
    model, x = Normed(), torch.randn(5, 3, 6, 6)
    exact, local = (sw.capture(model, (x,), batch_norm=word) for word in ("exact", "local"))
    kinds = [op.kind for op in local.ops]
    assert "local_batch_norm" in kinds and "normalize" not in kinds
    assert [key for key, _ in local.updates] == [key for key, _ in exact.updates]
    assert local.fingerprint != exact.fingerprint
    in_eval = sw.capture(model.eval(), (x,), batch_norm="local")
    assert "local_batch_norm" not in {op.kind for op in in_eval.ops}
    with pytest.raises(
        NumericsError, match="batch_norm='ddp' is not known; write batch_norm='exact'"
    ):
        sw.capture(model, (x,), batch_norm="ddp")


def test_the_batch_needs_no_reduction_but_that_of_the_buffers():
    """Forward and backward: the statistics of the buffers, once, and the gradients of weights."""
    graph = sw.capture(Normed(), (torch.randn(64, 3, 32, 32),), batch_norm="local")
    baselines = sw.search(graph, sw.Machine.preset("2xcpu")).baselines
    plan = {plan.name: plan for plan in baselines}["data parallel"]
    reduced = [
        (t.value, t.phase is Phase.BACKWARD)
        for t in plan.transfers
        if "all_reduce dp" in t.collectives
    ]
    activations = [value for value, backward in reduced if not backward and value in plan.tilings]
    parameters = {p.name for p in plan.parameters}
    assert all(value in parameters for value, backward in reduced if backward)
    assert all(value.startswith("sum") for value in activations)
    (statistics,) = {v for v, backward in reduced if not backward} - set(activations)
    assert statistics == "local_batch_norm.3"
    assert "batch_norm    local: statistics are of each device's own part" in explain(plan)
