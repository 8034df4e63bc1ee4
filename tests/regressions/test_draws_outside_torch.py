"""Numbers drawn by Python's or NumPy's generators were constants of the graph, in silence.

`x + torch.from_numpy(np.random.randn(...))` trained with the noise of one call (losses off by
0.17), `if random.random() < p` with one of the branches, and Wav2Vec2 with one mask. Such models
are refused now with the line that draws. In strict mode, which replaces NumPy's functions by those
of torch, a model on the meta device drew other numbers than its module.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.tracing.call import CaptureError

WIDTH = 6
OWN = np.random.default_rng(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.drawn, self.numbers = random.Random(0), np.random.default_rng(0)

    def forward(self, x):
        return F.mse_loss(self.up(x) * self.factor(x), x)


class Noise(Model):
    def factor(self, x):
        return torch.from_numpy(np.random.randn(*x.shape)).to(x)


class Branch(Model):
    def factor(self, x):
        return 2.0 if random.random() < 0.5 else 1.0


class OwnPython(Model):
    def factor(self, x):
        return self.drawn.random()


class OwnNumpy(Model):
    def factor(self, x):
        return self.numbers.random()


class OfTheFile(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.mse_loss(self.up(x) * OWN.random(), x)


@pytest.mark.parametrize("kind", [Noise, Branch, OwnPython, OwnNumpy, OfTheFile])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_draws_of_other_generators_are_refused_with_the_line(kind, device):
    model, x = kind().to(device), torch.zeros(4, WIDTH, device=device)
    with pytest.raises(CaptureError, match=r"test_draws_outside_torch\.py:\d+: .*torch\.rand"):
        sw.capture(model, (x,))


class Strict(Model):
    """Traced as it runs it fails, in strict mode it does not."""

    def factor(self, x):
        return torch.tanh(torch.from_numpy(x.detach().numpy())) * self.drawn_factor(x)

    def drawn_factor(self, x):
        return torch.rand_like(x)


class StrictNoise(Strict):
    def drawn_factor(self, x):
        return torch.from_numpy(np.random.randn(*x.shape)).to(x)


class StrictNormal(Strict):
    def drawn_factor(self, x):
        return torch.tensor(np.random.normal(1.0, 2.0, WIDTH)).to(x)


@pytest.mark.parametrize("kind", [StrictNoise, StrictNormal])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_draws_in_strict_mode_are_refused_with_the_line(kind, device):
    model, x = kind().to(device), torch.zeros(4, WIDTH, device=device)
    with pytest.raises(CaptureError, match=r"test_draws_outside_torch\.py:\d+\): .*torch\.rand"):
        sw.capture(model, (x,))


def test_strict_mode_takes_draws_of_torch_and_cannot_trace_those_of_python():
    class Python(Strict):
        def drawn_factor(self, x):
            return self.drawn.random() * random.random()

    x = torch.zeros(4, WIDTH)
    assert "strict mode" in sw.capture(Strict(), (x,)).note
    with pytest.raises(CaptureError, match=r"test_draws_outside_torch\.py:\d+: "):
        sw.capture(Python(), (x,))


def test_models_that_draw_with_torch_and_generators_that_are_not_used_are_captured():
    class Quiet(Model):
        def factor(self, x):
            return torch.rand_like(x)

    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    sw.capture(Quiet(), (torch.zeros(4, WIDTH),))
    assert random.getstate() == python
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy)
