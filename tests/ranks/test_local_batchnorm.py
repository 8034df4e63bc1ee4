"""`batch_norm="local"` is DDP's habit: the same losses, gradients and weights, step after step."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Batch norms of images and of features, with and without weights."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3),
            nn.BatchNorm2d(4, affine=False, momentum=0.3), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(4 * 16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.features(x)), y)


def example():
    torch.manual_seed(0)
    batch = {"x": torch.randn(10, 3, 8, 8, dtype=torch.float64), "y": torch.randint(5, (10,))}
    return Net().double(), batch


def planned():
    model, batch = example()
    graph = sw.capture(model, (), batch, batch_norm="local")
    baselines = sw.search(graph, sw.Machine.preset("2xcpu"), optimizer="sgd").baselines
    return {plan.name: plan for plan in baselines}["data parallel"]


def test_it_equals_distributed_data_parallel():
    run_ranks(2, _equals_ddp, plan_to_json(planned()))


def _equals_ddp(text):
    model, batch = example()
    ours = sw.parallelize(model, sw.Plan.from_json(text))
    # DDP broadcasts rank 0's buffers; without, the mean over its ranks is what we keep.
    theirs = DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    part = {key: value.chunk(2)[dist.get_rank()] for key, value in batch.items()}
    alone = example()[0](**batch)
    for step in range(3):
        for one, given, optimizer in zip((ours, theirs), (batch, part), optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(**given)
            loss.backward()
            if one is ours:
                our_loss = loss.detach()
        dist.all_reduce(loss := loss.detach() / 2)
        torch.testing.assert_close(our_loss, loss, rtol=1e-12, atol=1e-12)
        assert step or not torch.allclose(our_loss, alone), "one device gives something else"
        for key, parameter in theirs.module.named_parameters():
            mine = whole(ours.get_parameter(key).grad).reshape(parameter.shape)
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    for key, parameter in theirs.module.named_parameters():
        mine = whole(ours.get_parameter(key)).reshape(parameter.shape)
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-10, atol=1e-12)
    for key, buffer in theirs.module.named_buffers():
        mean = buffer.double() / 2
        dist.all_reduce(mean)
        torch.testing.assert_close(ours.get_buffer(key).double(), mean, rtol=1e-10, atol=1e-12)


def test_verify_says_what_it_compares():
    model, batch = example()
    report = sw.verify(model, planned(), (), batch)
    assert report.ok and report.max_gradient_error < 1e-10
    (note,) = report.notes
    assert "is not what one device computes on the whole batch" in note
    assert "one device whose batch norms see the same parts of the batch" in note
