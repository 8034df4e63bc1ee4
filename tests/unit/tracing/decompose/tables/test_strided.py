"""Operators on memory give the same elements wherever their operands lie in memory."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.decompose import table

TABLE = table()
aten = torch.ops.aten


def _run(function, x, *args):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    found = function(x, *args)
    weights = torch.linspace(1, 2, found.numel(), dtype=torch.float64).view(found.shape)
    (found * weights).sum().backward()
    return found.detach(), x.grad


@pytest.mark.parametrize(
    "turned, size, stride, start",
    [
        (False, (3, 4, 2, 4), (20, 4, 4, 1), None),  # windows of each row
        (True, (5, 2, 2, 4), (4, 20, 20, 1), None),  # the same of rows that are not the outermost
        (True, (5,), (3,), 2),
        (False, (2, 2), (0, 7), 1),
    ],
)
def test_elements_at_addresses_are_looked_up(turned, size, stride, start):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    x = x.transpose(0, 1) if turned else x
    expected = _run(aten.as_strided.default, x, size, stride, start)
    assert torch.equal(TABLE[aten.as_strided.default](x, size, stride, start), expected[0])
    ours = _run(TABLE[aten.as_strided.default], x, size, stride, start)
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)


class Windows(nn.Module):
    """Overlapping windows of rows that are transposed in memory, as those of Longformer."""

    def __init__(self, last):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), last

    def forward(self, x):
        rows = self.layer(x).transpose(0, 1)
        first, second, third = rows.stride()
        size = (rows.shape[0], 2, 2, self.last)
        return rows.as_strided(size, (first, second, second, third)).sum()


def test_a_graph_reads_no_memory():
    graph = sw.capture(Windows(4), (torch.zeros(3, 5, 4),))
    assert not [op for op in graph.ops if op.kind == "as_strided"]
    with pytest.raises(CaptureError, match="reads memory that is no element of its tensor"):
        sw.capture(Windows(40), (torch.zeros(3, 5, 4),))


@pytest.mark.parametrize("operator, args", [
    (aten.slice_scatter.default, (-1, 1, 5, 2)), (aten.select_scatter.default, (1, 2)),
])  # fmt: skip
def test_parts_of_complex_tensors_have_derivatives(operator, args):
    x = torch.randn(3, 6, dtype=torch.complex128)
    shape = (3, 2) if operator is aten.slice_scatter.default else (3,)
    part = torch.randn(shape, dtype=torch.complex128).conj().requires_grad_()
    found = TABLE[operator](x, part, *args)
    assert torch.equal(found, operator(x, part.detach().resolve_conj(), *args))
    (gradient,) = torch.autograd.grad(found.abs().square().sum(), part)
    torch.testing.assert_close(gradient, 2 * part.detach().resolve_conj())
    assert TABLE[operator](x.real, part.real, *args) is NotImplemented
