"""What sub-modules that are kept whole change, they change in a plan too, or they are refused.

A user's block decides on its data, so it is kept whole as one operator. Its batch norm never
updated its running statistics under a plan, and so did no `BatchNorm1d(momentum=None)`, whose
factor is taken from a counter: capture read the versions of tensors to see what changes, and
`F.batch_norm` writes without counting one up. Evaluation then normalised with zeros and ones.
Changes of parameters and of arguments in place were lost or made twice in the same silence.

Now capture compares values before and after, in two samples, and a call compares again.
"""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from tests.zoo.subject import Subject, worst

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Around(nn.Module):
    """Layers around a block, so that the block is a sub-module."""

    def __init__(self, block):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), block, nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.block(x)).square().mean()


class Decides(nn.Module):
    """Cannot be traced, normalises over the batch, and counts large batches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("negative", torch.zeros(()))

    def forward(self, x):
        if x.sum() < 0:
            self.negative += 1
        return self.norm(x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("block", [Decides, lambda: nn.BatchNorm1d(4, momentum=None)])
def test_running_statistics_are_those_of_the_module(block, sign):
    torch.manual_seed(0)
    model = Around(block()).double()
    nn.init.eye_(model.first.weight)
    alone = copy.deepcopy(model)
    one = Subject(model, {"x": sign * X.abs().double()})
    assert any(op.kind == "opaque" for op in one.graph.ops)
    module = one.one_device()
    for _ in range(2):  # the second with a counter that is not zero
        module(**one.batch)
        alone(**one.batch)
    buffers = {key: value.clone() for key, value in alone.named_buffers()}
    assert not torch.equal(buffers[next(iter(buffers))], torch.zeros(4).double())
    found = {key: module.get_buffer(key) for key in buffers}
    assert worst(buffers, found)[0] < 1e-12


class ShrinksWeights(nn.Module):
    """Spectral tricks of this kind write to `.data`, which counts no version."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        self.weight.data.mul_(0.9)
        return x * self.weight


def test_a_changed_parameter_is_refused_in_a_line_and_the_model_stays():
    model = Around(ShrinksWeights())
    with pytest.raises(CaptureError, match=r"changes its parameter weight in place") as wrong:
        sw.capture(model, (X,))
    assert "\n" not in str(wrong.value)
    assert torch.equal(model.block.weight.detach(), torch.ones(4))


class ChangesItsInput(nn.Module):
    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return x.relu_()


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ChangesItsInput()

    def forward(self, x):
        x = x * 2
        return self.inner(x) + x


def test_a_module_that_changes_its_input_is_kept_with_the_one_that_calls_it():
    """Alone it would leave the caller's tensor as it was, and the sum would be another."""
    torch.manual_seed(0)
    one = Subject(Around(Sequence()), {"x": X})
    (op,) = (op for op in one.graph.ops if op.kind == "opaque")
    assert op.args[1] == "block"
    expected = Around(Sequence()).double()
    expected.load_state_dict(one.weights)
    found = one.run(one.one_device())["loss"]
    torch.testing.assert_close(found, expected(**one.batch).detach(), rtol=1e-12, atol=0)


def test_an_input_that_no_module_but_the_model_owns_is_refused():
    with pytest.raises(CaptureError, match=r"block changes a tensor that it is called with") as e:
        sw.capture(Around(ChangesItsInput()), (X,))
    assert "\n" not in str(e.value)


class Rare(nn.Module):
    """Changes a buffer for data that no sample is like."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if x.abs().max() > 1e6:
            self.seen += 1
        return x


def test_a_buffer_that_no_sample_changed_is_watched_in_every_call():
    model = Around(Rare())
    captured = capture_call(model, (X,))
    assert not captured.graph.updates
    call = captured.opaque["block"]
    call([torch.zeros(()), X])
    with pytest.raises(ValueError, match="block changed its buffer seen for this batch"):
        call([torch.zeros(()), X * 1e8])


class Counts(nn.Module):
    """Returns a list of how many rows are positive, and of how many are not, as routers do."""

    def forward(self, x):
        positive = x[:, 0] > 0
        order = positive.to(torch.int64).argsort(stable=True)
        return order, [int((~positive).sum()), int(positive.sum())]


class Halves(nn.Module):
    """Scales rows in runs whose lengths a module inside returns as numbers."""

    def __init__(self):
        super().__init__()
        self.counts, self.scales = Counts(), nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x):
        order, sizes = self.counts(x)
        parts = x[order].split(sizes)
        rows = torch.cat([part * scale for part, scale in zip(parts, self.scales, strict=True)])
        return torch.zeros_like(rows).index_copy(0, order, rows)


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_a_module_takes_from_its_data_are_no_constants(sign):
    torch.manual_seed(0)
    model = Around(Halves()).double()
    batch = {"x": X.double()}
    one = Subject(model, batch)
    assert set(one.captured.opaque) == {"block"}
    x = sign * batch["x"]
    torch.testing.assert_close(one.one_device()(x=x), model(x=x))


class Scaled(nn.Module):
    """Scales by a number that a module inside returns, another one for large data."""

    def __init__(self):
        super().__init__()
        self.level = Level()

    def forward(self, x):
        x, factor = self.level(x)
        return x * factor


class Level(nn.Module):
    """Returns its argument and a number."""

    def forward(self, x):
        return x * 1.0, 2 if x.abs().max() > 1e6 else 1


def test_numbers_that_only_a_later_batch_changes_are_refused():
    call = capture_call(Around(Scaled()), (X,)).opaque["block.level"]
    call([X])
    with pytest.raises(ValueError, match=r"block.level returned \[2\] .* and \[1\] when"):
        call([X * 1e8])
