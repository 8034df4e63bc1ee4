"""A step in micro-batches, on one device, is the step of the whole batch, and keeps less."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.runtime.batch import BatchError
from tests.harness import models
from tests.ranks.test_random_tilings import TOLERANCE, Widened, error

EXAMPLES = {
    "cnn with dropout": lambda: models.cnn(batch=7),
    "running mean": lambda: models.mlp(batch=7),
    "traps": models.traps,
    "regularised": lambda: regularised(),
    "summed weights": lambda: summed(),
}


class Regularised(nn.Module):
    """A term of the loss reads no sample, one parameter is frozen, and one is not used."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 4)
        self.idle = nn.Parameter(torch.ones(3))
        self.down.bias.requires_grad_(False)

    def forward(self, x, y):
        decay = 0.1 * self.up.weight.square().sum() / y.numel()
        return F.cross_entropy(self.down(torch.tanh(self.up(x))), y) + decay


class Summed(nn.Module):
    """Parameters whose gradients are one tensor, one of them seen in another shape."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(2, 3))
        self.third = nn.Parameter(torch.randn(3, 2))

    def forward(self, x, y):
        weights = self.first + self.second.flatten() + self.third.view(6)
        return ((x * weights).sum(1) * y).square().mean()


def summed(size=7):
    torch.manual_seed(0)
    return Summed(), {"x": torch.randn(size, 6), "y": torch.randn(size)}


def regularised(size=7):
    torch.manual_seed(0)
    return Regularised(), {"x": torch.randn(size, 6), "y": torch.randint(0, 4, (size,))}


def one_device(example, count):
    one = Widened(*models.double(*example()))
    return one, one.one_device(count)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_loss_gradients_and_buffers_are_those_of_the_whole_batch(name, count):
    one, module = one_device(EXAMPLES[name], count)
    serial, pieces = one.run(one.one_device()), one.run(module)
    assert serial.keys() == pieces.keys()
    for key in serial:
        assert error(serial[key], pieces[key]) <= TOLERANCE, key


def test_gradients_are_scaled_by_what_comes_back():
    one, module = one_device(regularised, 2)
    module(**one.batch).backward()
    gradients = {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
    assert gradients.keys() == {"up.weight", "up.bias", "down.weight"}
    (3 * module(**one.batch)).backward()  # gradients are added to those that are there
    for key, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(key).grad, 4 * gradient)


def test_a_second_backward_says_that_nothing_is_kept():
    one, module = one_device(regularised, 2)
    loss = module(**one.batch)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the module again"):
        loss.backward()


def test_without_gradients_only_the_loss_is_computed():
    one, module = one_device(regularised, 3)
    with torch.no_grad():
        loss = module(**one.batch)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, one.one_device()(**one.batch).detach())


def test_a_training_step_is_the_one_of_the_whole_batch():
    one, module = one_device(regularised, 3)
    whole = one.one_device()
    for each in (module, whole):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.1)
        losses = [each.train_step(optimizer, one.batch).item() for _ in range(3)]
        assert losses[2] < losses[0]
    for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_batch_of_another_size_is_refused():
    one, module = one_device(regularised, 2)
    with pytest.raises(BatchError, match=r"x has shape \[6, 6\]; the plan is for a global batch"):
        module(**{key: value[:6] for key, value in one.batch.items()})


@pytest.mark.slow
def test_one_compiled_program_serves_all_micro_batches_of_a_size():
    losses = []
    for wrap in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
        one, module = one_device(lambda: models.mlp(batch=8), 4)
        compiled = wrap(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = compiled(**one.batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert len(module._sw_program.regions.parts) == 1
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-12)
    assert losses[0] != losses[1]


def test_only_one_micro_batch_is_kept_for_backward():
    most = {}
    for count in (1, 2, 4):
        one, module = one_device(lambda: models.cnn(batch=8), count)
        held = PeakParts()
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept.tensor):
            module(**one.batch).backward()
        most[count] = held.most
    assert most[2] < 0.75 * most[1]
    assert most[4] < 0.75 * most[2]


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor):
        self.tensor = tensor


class PeakParts:
    """Bytes that autograd keeps at a time, each storage once."""

    def __init__(self):
        self.now, self.most, self.readers = 0, 0, {}

    def pack(self, tensor):
        kept = Kept(tensor)
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if not self.readers.get(key):
            self.now += size
        self.readers[key] = self.readers.get(key, 0) + 1
        self.most = max(self.most, self.now)
        weakref.finalize(kept, self.free, key, size)
        return kept

    def free(self, key, size):
        self.readers[key] -= 1
        if not self.readers[key]:
            self.now -= size
