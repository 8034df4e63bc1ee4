"""Prices and temporaries of a loss in chunks beside those of the operators that it replaces."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.machine.presets import preset
from shardwright.planner.tables.memory import workspace_bytes
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.loss_chunks import with_loss_chunks
from shardwright.simulate.costs.chunked.loss import loss_backward_kernels, loss_forward_kernels
from shardwright.simulate.costs.compute import backward_seconds, forward_seconds
from shardwright.simulate.costs.useful_flop import useful_flop
from shardwright.simulate.costs.workload import OperatorClass, workload

TOKENS, WIDTH, WORDS = 65536, 1024, 32768
DEVICE = preset("8xH100").device


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, dtype=torch.bfloat16)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(x).float(), labels)


@pytest.fixture(scope="module")
def graph():
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        return sw.capture(Head(), (x, labels))


def _totals(graph):
    """Seconds forward and backward, and the most bytes that one operator takes while it runs."""
    rules = analyze(graph).rules
    works = [workload(op, rules[op.name], graph) for op in graph.ops]
    sized = [(work, np.array(work.sizes, np.int64)[:, None]) for work in works]
    forward = sum(forward_seconds(work, sizes, DEVICE)[0] for work, sizes in sized)
    trained = [(work, sizes) for work, sizes in sized if work.has_backward]
    backward = sum(backward_seconds(work, sizes, DEVICE)[0] for work, sizes in trained)
    return forward, backward, max(workspace_bytes(work, sizes)[0] for work, sizes in sized)


def test_chunks_take_more_time_and_less_memory(graph):
    whole = _totals(graph)
    found = {count: _totals(with_loss_chunks(graph, count)) for count in (2, 4, 16, 64)}
    projection = 2 * TOKENS * WIDTH * WORDS / DEVICE.peak_flop_per_s("bfloat16")
    for forward, backward, peak in found.values():
        assert whole[0] < forward < 1.5 * whole[0]
        assert whole[1] + projection < backward < 2.5 * whole[1], "logits are computed again"
        assert peak < whole[2]
    seconds = [forward + backward for forward, backward, _ in found.values()]
    assert seconds == sorted(seconds)
    peaks = [peak for *_, peak in found.values()]
    logits = TOKENS * WORDS * 6  # in bfloat16 and in float32
    for (a, one), (b, other) in zip(list(found.items()), list(found.items())[1:], strict=False):
        assert one[2] - other[2] == logits // a - logits // b
    assert peaks == sorted(peaks, reverse=True)


def _kernels(graph, count):
    """Kernels of a loss in `count` chunks, forward and backward."""
    chunked = with_loss_chunks(graph, count)
    rules = analyze(chunked).rules
    work = next(w for op in chunked.ops if (w := workload(op, rules[op.name], chunked)).chunks > 1)
    sizes = np.array(work.sizes, np.int64)[:, None]
    return loss_forward_kernels(work, sizes), loss_backward_kernels(work, sizes)


def _moved(kernels, kind):
    return [int(one.moved[0]) for one in kernels if one.kind is kind]


def test_all_products_of_a_chunk_move_hidden_states_weights_and_logits(graph):
    forward, backward = _kernels(graph, 8)
    elements = (TOKENS + WORDS // 8) * WIDTH + TOKENS * WORDS // 8
    assert _moved((*forward, *backward), OperatorClass.MATMUL) == [2 * elements] * (4 * 8)


def test_casts_move_logits_and_sums_of_gradients_the_hidden_states(graph):
    forward, backward = _kernels(graph, 8)
    cast = (2 + 4) * TOKENS * WORDS // 8
    summed = (2 + 4 + 4) * TOKENS * WIDTH  # a product is read, and the sum read and written
    assert _moved(forward, OperatorClass.MEMORY) == [cast] * 8
    assert _moved(backward, OperatorClass.MEMORY) == [cast, cast, summed] * 8
    logits = 4 * TOKENS * WORDS // 8
    assert _moved(forward, OperatorClass.FUNCTION) == [2 * logits] * 8
    assert _moved(backward, OperatorClass.FUNCTION) == [2 * logits] * 8


def test_logits_that_are_computed_again_are_no_useful_work(graph):
    chunked = with_loss_chunks(graph, 8)
    assert useful_flop(chunked, analyze(chunked)) == useful_flop(graph, analyze(graph))
