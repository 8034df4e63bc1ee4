"""Norms keep on accelerators what torch's kernel for them keeps, and on CPUs what is run there."""

import pytest
import torch
from torch.nn import functional as F

from shardwright.ir.op_memory import Seen
from shardwright.tracing.capture import capture_call
from shardwright.tracing.op_memory.footprints import Footprints

ROWS, WIDTH = 6, 8


class Normed(torch.nn.Module):
    def __init__(self, weight_dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, dtype=weight_dtype))

    def forward(self, x):
        return F.rms_norm(x * 2, (WIDTH,), self.weight).sum()


def norm_of(dtype, weight_dtype=None):
    x = torch.zeros(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    graph = capture_call(Normed(weight_dtype or dtype), (x,), {}).graph
    return graph, next(op for op in graph.ops if op.kind == "rms_norm")


def kept(graph, op, *, on_cpu):
    """Bytes that a call keeps beside its operands, and the operands that it keeps."""
    names = tuple(dict.fromkeys(op.operands))
    given = tuple(
        Seen(t.shape, torch.empty(t.shape).stride(), t.dtype, True)
        for t in (graph.tensor[name] for name in names)
    )
    call = Footprints(on_cpu=on_cpu).call(op, names, given)
    forward = call.forward
    made = {n: size for n, size in enumerate(forward.made, len(names)) if n in forward.saved}
    gradients = call.backward((given[0].strides,)).gradients
    assert all(one is not None for one in gradients)
    return sum(made.values()), {names[n] for n in forward.saved if n < len(names)}


@pytest.mark.parametrize("dtype, item", [("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_an_accelerator_keeps_input_weight_and_a_number_for_each_row(dtype, item):
    graph, op = norm_of(getattr(torch, dtype))
    wide = max(item, 4)
    assert kept(graph, op, on_cpu=False) == (ROWS * wide, {*op.operands})
    assert (op.saves, op.extra_saved) == (op.operands, ROWS * wide)
    more, _ = kept(graph, op, on_cpu=True)
    copies = 2 if item == 2 else 1  # in float32: of the input if it is narrower, and normed
    assert more >= copies * ROWS * WIDTH * wide + ROWS * wide


def test_a_weight_of_another_dtype_has_no_kernel():
    graph, op = norm_of(torch.bfloat16, torch.float32)
    assert kept(graph, op, on_cpu=False) == kept(graph, op, on_cpu=True)
