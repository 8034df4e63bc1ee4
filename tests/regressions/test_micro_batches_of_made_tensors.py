"""One operator silently took micro-batches away from the whole search.

Graphs with `view_as_complex`, with tensors made in the batch's size, or with `sort`, could not take
their batch in parts, and the search only said to raise the limit. They can now, on one device and
on ranks: a made tensor is whole for every part and each takes its rows, so that an `arange` over
the batch counts on. What needs the whole batch is named, with its line. Selecting tokens of each
sample, `x[torch.arange(batch), last]`, needed the whole batch too: it is a `gather`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.rules.micro_batches import MicroBatchError
from tests.harness import models

BATCH, LENGTH, WIDTH = 7, 5, 8
ONE = sw.Machine.preset("1xcpu")


class Last(nn.Module):
    """Tokens at places of their own in each sample: one, counted from the end, and two."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, wanted):
        hidden, samples = self.up(x), torch.arange(len(x), device=x.device)
        last = x[..., 0].argmax(-1)
        one = F.mse_loss(hidden[samples, last], wanted[:, 0])
        fromend = F.mse_loss(hidden[samples, last - LENGTH], wanted[:, 1])
        two = hidden[samples.unsqueeze(1), torch.stack([last, last - 1], 1)]
        score = hidden[..., 0][torch.arange(0, len(x)), last]
        return one + 2 * fromend + F.mse_loss(two, wanted[:, 2:4]) + (score**2).mean()


class Rolled(nn.Module):
    """Compares each sample with another one of the batch."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, wanted):
        hidden = self.up(x)
        others = (torch.arange(len(x)) + 1) % len(x)
        return F.mse_loss(hidden[others, 0], wanted[:, 0])


class Written(nn.Module):
    """Writes samples one by one into an empty tensor of the batch's size, as no rule can split."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, wanted):
        hidden = x.new_zeros(x.shape)
        for i in range(len(x)):
            hidden[i] = torch.tanh(self.up(x[i]))
        return F.mse_loss(hidden, wanted)


def batch():
    generator = torch.Generator().manual_seed(1)
    sizes = (BATCH, LENGTH, WIDTH)
    return [torch.randn(sizes, dtype=torch.float64, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("count", (2, 3))
def test_made_tensors_and_complex_views_take_their_batch_in_parts(count):
    model, given = models.double(*models.made_tensors(batch=BATCH))
    loss = model(**given)
    loss.backward()
    plan = sw.plan(model, (), given, machine=ONE, micro_batches=(count,))
    assert plan.micro_batches == count
    module = sw.parallelize(model, plan)
    found = module(**given)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert theirs.keys() == {leaf.name for leaf in module.graph.leaves_of(LeafKind.PARAMETER)}
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-10, atol=1e-13)


def test_made_tensors_are_split_as_what_is_written_to_them():
    """A model writes into an empty tensor of the whole batch."""
    model, given = models.made_tensors()
    plan = sw.price(sw.capture(model, (), given), "2xH100", "dp_replicate=2")
    made = [op for op in plan.ops if op.target.split(".")[1] in ("empty", "zeros")]
    assert len(made) == 3 and {op.splits for op in made} == {("batch",)}


def test_what_needs_the_whole_batch_is_named_with_its_line():
    """In the error that micro-batches are not possible, and in the notes of a plan without."""
    graph = sw.capture(Rolled().double(), batch())
    culprit = r"index in .*test_micro_batches_of_made_tensors\.py:\d+\) needs the whole batch of"
    with pytest.raises(MicroBatchError, match=culprit):
        sw.search(graph, ONE, micro_batches=(2,))
    found = sw.search(graph, ONE, micro_batches="all")
    (line,) = (op.source.line for op in graph.ops if op.kind == "index")
    assert any(f"made_tensors.py:{line}) needs" in note for note in found.fastest().notes)


def test_samples_that_are_written_one_by_one_are_refused_with_the_line():
    culprit = r"no sum over the samples.*: select in .*made_tensors\.py:\d+\) needs the whole batch"
    with pytest.raises(MicroBatchError, match=culprit):
        sw.plan(Written().double(), batch(), machine=ONE, micro_batches=(2,))


@pytest.mark.parametrize("count", (1, 2, 3))
def test_tokens_selected_of_each_sample_are_gathered(count):
    torch.manual_seed(0)
    model, given = Last().double(), batch()
    graph = sw.capture(model, given)
    assert not [op for op in graph.ops if op.kind == "index"]
    loss = model(*given)
    loss.backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters()}
    plan = sw.plan(model, given, machine=ONE, micro_batches=(count,))
    module = sw.parallelize(model, plan)
    found = module(*given)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-10, atol=1e-13)


def test_a_place_out_of_range_is_still_an_error():
    class Beyond(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, places):
            return self.up(x)[torch.arange(len(x)), places].sum()

    model, (x, _) = Beyond().double(), batch()
    good = torch.arange(BATCH) % LENGTH
    module = sw.parallelize(model, sw.plan(model, (x, good), machine=ONE))
    torch.testing.assert_close(module(x, good - LENGTH), model(x, good - LENGTH))
    for place in (LENGTH, -LENGTH - 1):
        with pytest.raises((IndexError, RuntimeError)):
            module(x, torch.full((BATCH,), place))
