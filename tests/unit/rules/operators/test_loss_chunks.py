"""Which losses are computed in chunks, and what their graphs are then."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.graph import verify
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.loss_chunks import LossChunksError, with_loss_chunks
from shardwright.tracing.export.operators import call_op

WORDS, WIDTH = 11, 6


class Model(nn.Module):
    """A tied table, logits in bfloat16 that `loss` makes a loss of."""

    def __init__(self, loss, dtype=torch.bfloat16):
        super().__init__()
        self.loss, self.table = loss, nn.Embedding(WORDS, WIDTH, dtype=dtype)

    def forward(self, ids):
        return self.loss(F.linear(self.table(ids).tanh(), self.table.weight), ids)


def shifted(logits, ids):
    logits = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), ids[..., 1:].reshape(-1), ignore_index=3)


def plain(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), label_smoothing=0.1)


def read_twice(logits, ids):
    return plain(logits, ids) + 1e-4 * logits.logsumexp(-1).square().mean()


def of_probabilities(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(ids.flatten(), WORDS).to(logits.dtype))


def scaled(logits, ids):
    return plain(30 * torch.tanh(logits / 30), ids)


IDS = torch.arange(12).view(3, 4) % WORDS


@pytest.mark.parametrize("loss", (shifted, plain))
def test_the_graph_in_chunks_computes_the_same_without_logits(loss):
    model = Model(loss, torch.float64)
    graph = sw.capture(model, (IDS,))
    chunked = with_loss_chunks(graph, 4)
    verify(chunked)
    analyze(chunked)
    assert not any(value.shape[-1:] == (WORDS,) for value in chunked.values), "no logits are left"
    assert chunked.numerics.loss_chunks == 4 and chunked.fingerprint != graph.fingerprint
    assert chunked == sw.capture(model, (IDS,), loss_chunks=4)
    assert _value(chunked, model) == pytest.approx(_value(graph, model), rel=1e-6)


def _value(graph, model):
    values = {"table.weight": model.table.weight.detach(), "args.0": IDS}
    for op in graph.ops:
        values.update(zip(op.outputs, call_op(op, values, torch.device("cpu")), strict=True))
    (loss,) = graph.outputs
    return values[loss].item()


@pytest.mark.parametrize(
    "loss, reason",
    (
        (read_twice, "its logits are also read by"),
        (of_probabilities, "its cross entropy takes a probability for each class"),
        (scaled, "its logits come from mul"),
        (lambda logits, _: logits.square().mean(), "the model computes no cross entropy"),
    ),
)
def test_other_losses_are_whole_and_refused_where_chunks_are_asked_for(loss, reason):
    with pytest.raises(LossChunksError, match=f"loss_chunks=4 is not possible: {reason}"):
        sw.capture(Model(loss), (IDS,), loss_chunks=4)
    assert with_loss_chunks(sw.capture(Model(loss), (IDS,)), 1).ops


def test_returned_logits_are_refused():
    graph = sw.capture(Model(plain), (IDS,))
    logits = next(op for op in graph.ops if op.kind == "linear").outputs[0]
    with pytest.raises(LossChunksError, match="its logits are returned"):
        with_loss_chunks(replace(graph, outputs=(*graph.outputs, logits)), 2)
