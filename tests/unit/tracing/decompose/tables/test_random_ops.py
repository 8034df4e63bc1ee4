"""Random operators become draws that depend on the global index alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.program.instructions import Uniform
from shardwright.runtime.random.dropout import GlobalUniform, random_state
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from tests.zoo.subject import Subject


class Draws(nn.Module):
    """Adds to a linear layer what a function draws of its input."""

    def __init__(self, draw):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.draw = draw

    def forward(self, x):
        drawn = self.draw(x)
        return {"y": self.layer(x) * 0.0 + drawn}


def _drawn(draw, step=0):
    one = Subject(Draws(draw), {"x": torch.ones(64, 64)}, wide=False)
    module = one.one_device()
    for _ in range(step + 1):
        y = module(**one.batch)["y"]
    return y.detach()


@pytest.mark.parametrize(
    "draw, mean, deviation",
    [
        (lambda x: torch.rand(64, 64), 0.5, 12**-0.5),
        (lambda x: torch.rand_like(x), 0.5, 12**-0.5),
        (lambda x: torch.randn(64, 64), 0.0, 1.0),
        (lambda x: torch.randn_like(x), 0.0, 1.0),
        (lambda x: torch.randint(2, 6, (64, 64)).float(), 3.5, 1.25**0.5),
        (lambda x: torch.randint_like(x, 4), 1.5, 1.25**0.5),
        (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21**0.5),
        (lambda x: torch.empty_like(x).bernoulli_(0.3), 0.3, 0.21**0.5),
        (lambda x: torch.empty_like(x).uniform_(-1, 1), 0.0, 3**-0.5),
        (lambda x: torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
        (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
        (lambda x: F.alpha_dropout(x, 0.3, training=True), None, None),
        (lambda x: F.dropout(x, 0.25, training=True), 1.0, 3**-0.5),
    ],
)
def test_draws_have_their_distribution_and_change_with_the_step(draw, mean, deviation):
    first, second = _drawn(draw), _drawn(draw, step=1)
    assert not torch.equal(first, second)
    if mean is not None:
        error = 4 * deviation / math.sqrt(first.numel())
        assert first.mean().item() == pytest.approx(mean, abs=error)
        assert first.std().item() == pytest.approx(deviation, rel=0.08)


def test_dropout_of_features_drops_whole_channels():
    y = _drawn(lambda x: F.dropout2d(x.view(8, 8, 8, 8), 0.5, training=True).view(64, 64))
    channels = y.view(64, 64)
    assert set(channels.sum(1).tolist()) == {0.0, 128.0}


def test_a_permutation_is_one():
    y = _drawn(lambda x: torch.randperm(64).float() + torch.zeros_like(x))
    assert sorted(y[0].tolist()) == list(range(64))
    assert y[0].tolist() != list(range(64))


def test_a_tile_draws_what_the_whole_draws():
    graph = capture_call(Draws(lambda x: torch.rand(64, 64)), (torch.ones(64, 64),)).graph
    (op,) = (op for op in graph.ops if op.kind == "uniform")
    state, cpu = random_state(1, 5, torch.device("cpu")), torch.device("cpu")
    whole = GlobalUniform(Uniform(op, (((0, 64, 64),), ((0, 64, 64),))), cpu)(state)
    local = type(op)(op.name, op.target, ((64, 10), *op.args[1:]), op.kwargs, op.outputs)
    part = GlobalUniform(Uniform(local, (((0, 64, 64),), ((7, 10, 64),))), cpu)(state)
    assert torch.equal(part, whole[:, 7:17])


def test_two_draws_of_one_step_differ():
    y = _drawn(lambda x: torch.rand(64, 64) - torch.rand(64, 64))
    assert y.abs().max() > 0.5


def test_an_operator_that_draws_by_itself_is_refused_with_its_line():
    with pytest.raises(CaptureError, match=r"test_\w+\.py:\d+\): aten\.multinomial.*torch\.rand"):
        capture_call(Draws(lambda x: torch.multinomial(x, 1).float()), (torch.ones(64, 64),))
