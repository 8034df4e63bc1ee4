"""How a graph takes its batch in pieces, which models cannot, and the sizes of a piece."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import PARTIAL, REPLICATE, Layout, Mesh, Shard
from shardwright.rules.analysis import analyze
from shardwright.rules.micro_batches import (
    MicroBatchError,
    _Chooser,
    gradient_layout,
    micro_batches,
)
from shardwright.rules.micro_graph import micro_graph
from shardwright.rules.placements import tiling_text
from shardwright.rules.rule import FactorKind, Split
from shardwright.tracing.capture import capture_call
from tests.harness import models
from tests.harness.small_graphs import build, op, rule


class Scored(nn.Module):
    """A linear layer under a loss that is given its scores."""

    def __init__(self, loss):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.layer(x), y)


class WeightsOnly(Scored):
    """A loss that reads no sample."""

    def __init__(self):
        super().__init__(None)

    def forward(self, x, y):
        return self.layer.weight.square().sum()


def captured(model, *args, **kwargs):
    graph = capture_call(model, args, kwargs).graph
    return graph, analyze(graph)


def batch(size=5):
    return torch.randn(size, 6), torch.randint(0, 3, (size,))


def cross_entropy(scores, y):
    return nn.functional.cross_entropy(scores, y)


def test_the_batch_is_split_and_what_counts_labels_is_whole():
    graph, analysis = captured(Scored(cross_entropy), *batch())
    micro = micro_batches(graph, analysis, 2)
    words = {name: tiling_text((choice,))[0] for name, choice in micro.choices.items()}
    assert words == {
        "linear": "b0",
        "cross_entropy_loss": "n",
        "ne": "-",
        "to_copy": "-",
        "sum": "-",
        "div": "+0",
    }
    assert micro.placements["linear"] == Shard(0)
    assert micro.placements["sum"] == REPLICATE
    assert micro.placements["div"] == PARTIAL
    assert str(micro.mesh(Mesh.parse("dp=4"))) == "mb=2 dp=4"


def test_gradients_mirror_values():
    mesh = Mesh.parse("mb=2 dp=4")
    for text, gradient in [
        ("mb:R dp:P", "mb:P dp:R"),
        ("mb:P dp:S(0)", "mb:R dp:S(0)"),
        ("mb:S(0) dp:R", "mb:S(0) dp:R"),
    ]:
        assert str(gradient_layout(Layout.parse(text, mesh))) == gradient


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, y: cross_entropy(scores, y) + 0.1 * scores.square().sum(),
        lambda scores, y: (scores.square().sum(1) / (1.0 + y)).sum(),
        lambda scores, y: scores.abs().mean(),
    ],
)
def test_sums_and_means_over_samples_are_cut(loss):
    graph, analysis = captured(Scored(loss), *batch())
    assert micro_batches(graph, analysis, 3).placements[graph.outputs[0]] == PARTIAL


@pytest.mark.parametrize(
    "loss, reader",
    [
        (lambda scores, y: scores.sum().square(), "square"),
        (lambda scores, y: scores.sum() * scores.square().sum(), "mul"),
        (lambda scores, y: scores.softmax(0).sum(), "softmax"),
        (lambda scores, y: scores.square().sum(1).amax(), "amax"),
    ],
)
def test_a_loss_that_is_no_sum_over_samples_is_refused(loss, reader):
    graph, analysis = captured(Scored(loss), *batch())
    with pytest.raises(
        MicroBatchError,
        match=rf"{reader} in .*test_\w+.py:\d+\) needs the whole batch of %\w+, which depends on"
        " parameters",
    ):
        micro_batches(graph, analysis, 2)


def test_what_reads_sizes_alone_is_not_to_blame():
    """A tensor made like scores has no batch, and neither has the largest score."""
    leaves = {"x": (LeafKind.INPUT, ((5,), (6,))), "w": (LeafKind.PARAMETER, ((6,), (3,)))}
    scores = op("y", "mm", "xw", rule("m k, k n -> m n", m=5, k=6, n=3))
    made = op("made", "new_zeros", "y", rule("m n -> a", whole="m n a", m=5, n=3, a=3))
    most = op("most", "amax", "y", rule("m n -> n", whole="m n", m=5, n=3))
    last = op("last", "mul", ["made", "most"], rule("n, n -> n", n=3))
    graph, analysis = build(leaves, [scores, made, most, last])
    dims = {"x": ((0,), (1,)), "w": ((1,), (2,)), "y": ((0,), (2,))}
    dims |= dict.fromkeys(("made", "most", "last"), ((2,),))
    chooser = _Chooser(graph, replace(analysis, dims=dims), 0)
    choices = {"y": Split("m"), "made": None, "most": None, "last": None}
    assert chooser.undivided(choices).startswith(": amax in ")


def test_batch_norm_is_refused():
    model, kwargs = models.cnn(norm=True)
    graph, analysis = captured(model, **kwargs)
    with pytest.raises(MicroBatchError, match=r"features\.1 .* needs the whole batch of %conv2d"):
        micro_batches(graph, analysis, 2)


def test_a_model_without_a_loss_and_a_loss_without_a_batch_are_refused():
    model, kwargs = models.no_loss()
    with pytest.raises(MicroBatchError, match="a model that returns one scalar loss"):
        micro_batches(*captured(model, **kwargs), 2)
    with pytest.raises(MicroBatchError, match="the loss is no sum over the samples"):
        micro_batches(*captured(WeightsOnly(), *batch()), 2)


@pytest.mark.parametrize("size, count", [(5, 4), (5, 6), (7, 5), (4, 0)])
def test_no_micro_batch_is_empty(size, count):
    graph, analysis = captured(Scored(cross_entropy), *batch(size))
    with pytest.raises(
        MicroBatchError,
        match=f"a batch of {size} cannot be cut into {count} micro-batches, none of them empty",
    ):
        micro_batches(graph, analysis, count)


def test_the_graph_of_a_micro_batch_has_the_sizes_of_the_longest():
    graph, analysis = captured(Scored(cross_entropy), *batch())
    small, sizes = micro_graph(graph, analysis, micro_batches(graph, analysis, 2))
    assert small.tensor["linear"].shape == (3, 3)
    assert small.tensor["args.0"].shape == (5, 6), "inputs are given whole"
    assert small.tensor["sum"].shape == ()
    rows = sizes.rules["linear"].factor["b0"]
    assert (rows.size, rows.least) == (3, 2)
    assert [factor.kind for factor in sizes.rules["ne"].factors] == [FactorKind.WHOLE]
    assert sizes.atoms["linear"] == ((3,), (3,))
    assert micro_graph(graph, analysis, micro_batches(graph, analysis, 1)) == (graph, analysis)
