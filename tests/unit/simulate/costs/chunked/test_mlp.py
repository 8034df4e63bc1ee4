"""Prices and temporaries of an MLP in chunks beside those of the operators that it replaces."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.op_memory import Seen, contiguous_strides
from shardwright.machine.presets import preset
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.mlp_chunks import CHUNKED_MLP, with_mlp_chunks
from shardwright.simulate.costs.chunked.mlp import (
    mlp_backward_kernels,
    mlp_chunk_bytes,
    mlp_forward_kernels,
)
from shardwright.simulate.costs.compute import backward_seconds, forward_seconds
from shardwright.simulate.costs.useful_flop import useful_flop
from shardwright.simulate.costs.workload import OperatorClass, workload
from shardwright.tracing.op_memory.footprints import Footprints

TOKENS, WIDTH, INNER = 65536, 2048, 8192
DEVICE = preset("8xH100").device


class Mlp(nn.Module):
    """With weights of their own for gate and up, or with one that holds both."""

    def __init__(self, together=False):
        super().__init__()
        self.both = nn.Linear(WIDTH, 2 * INNER, bias=False) if together else None
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        y = x.tanh()
        gate, up = (self.gate(y), self.up(y)) if self.both is None else self.both(y).chunk(2, -1)
        return (x + self.down(F.silu(gate) * up)).sum()


def _captured(together):
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.device("meta"):
        return sw.capture(Mlp(together).bfloat16(), (x,))


@pytest.fixture(scope="module")
def graph():
    return _captured(together=False)


def _work(graph):
    rules = analyze(graph).rules
    (op,) = (op for op in graph.ops if op.target == CHUNKED_MLP)
    work = workload(op, rules[op.name], graph)
    return op, work, np.array(work.sizes, np.int64)[:, None]


def _seconds(graph):
    rules = analyze(graph).rules
    works = [workload(op, rules[op.name], graph) for op in graph.ops]
    sized = [(work, np.array(work.sizes, np.int64)[:, None]) for work in works]
    forward = sum(forward_seconds(work, sizes, DEVICE)[0] for work, sizes in sized)
    trained = [(work, sizes) for work, sizes in sized if work.has_backward]
    return forward, sum(backward_seconds(work, sizes, DEVICE)[0] for work, sizes in trained)


def test_chunks_cost_the_first_products_once_more(graph):
    forward, backward = _seconds(graph)
    again = 2 * 2 * TOKENS * WIDTH * INNER / DEVICE.peak_flop_per_s("bfloat16")
    found = [_seconds(with_mlp_chunks(graph, count)) for count in (2, 4, 8)]
    for ahead, behind in found:
        assert forward <= ahead * (1 + 1e-9) and ahead < 1.2 * forward
        assert backward + again < behind < backward + 3 * again
    assert [sum(one) for one in found] == sorted(sum(one) for one in found)


def test_products_are_those_of_one_chunk(graph):
    _, work, sizes = _work(with_mlp_chunks(graph, 8))
    counts = []
    for kernels in (mlp_forward_kernels(work, sizes), mlp_backward_kernels(work, sizes)):
        products = [one for one in kernels if one.kind is OperatorClass.MATMUL]
        assert {int(one.flop[0]) for one in products} == {2 * TOKENS // 8 * WIDTH * INNER}
        counts.append(len(products) / 8)
    assert counts == [3, 2 + 6]


def test_what_is_computed_again_is_no_useful_work(graph):
    chunked = with_mlp_chunks(graph, 8)
    assert useful_flop(chunked, analyze(chunked)) == useful_flop(graph, analyze(graph))


def test_bytes_of_a_chunk_are_about_those_of_the_traced_call(graph):
    """Beyond operands, results and their gradients, which the tables count besides."""
    for count in (4, 16):
        chunked = with_mlp_chunks(graph, count)
        op, work, sizes = _work(chunked)
        names = tuple(dict.fromkeys(op.operands))
        shapes = [chunked.tensor[name].shape for name in names]
        given = tuple(Seen(s, contiguous_strides(s), "bfloat16", True) for s in shapes)
        call = Footprints().call(op, names, given)
        forward, backward = call.forward, call.backward((contiguous_strides(shapes[0]),))
        alive, most = dict[int, int](), 0
        for number, size in backward.events:
            if size >= 0:
                alive[number] = size
            else:
                alive.pop(number, None)
            most = max(most, sum(alive.values()))
        ends = 2 * 2 * TOKENS * WIDTH  # gradients of the result and of the input
        expected = mlp_chunk_bytes(work, sizes)[0]
        assert 0.75 * expected < most - ends < 1.1 * expected
        assert forward.peak < expected


def test_a_weight_that_holds_gate_and_up_costs_as_much_as_two(graph):
    two, one = (with_mlp_chunks(g, 4) for g in (graph, _captured(together=True)))
    assert useful_flop(one, analyze(one)) == useful_flop(two, analyze(two))
    assert sum(_seconds(one)) == pytest.approx(sum(_seconds(two)), rel=0.02)
    most = [mlp_chunk_bytes(*_work(g)[1:])[0] for g in (one, two)]
    assert most[0] - most[1] == 2 * WIDTH * INNER, "a larger product is added to the sums"
