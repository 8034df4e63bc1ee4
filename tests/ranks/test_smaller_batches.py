"""Batches of fewer rows than planned, and calls that declare what they pass."""

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

import shardwright as sw
from shardwright.runtime.batch import BatchError
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks
ROWS = 8


class Model(nn.Module):
    """A mean over labels that are not ignored, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 4)
        self.double()

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), y)


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (rows,), generator=generator)
    y[1::3] = -100
    return torch.randn(rows, 6, generator=generator).double(), y


def plans():
    """Plans that split the batch, parameters, and the step into micro-batches."""
    graph = sw.capture(Model(), batch(ROWS))
    named = {plan.name: plan for plan in sw.search(graph, sw.Machine.preset("2xcpu")).baselines}
    found = [named[name] for name in ("data parallel", "fully sharded", "tensor parallel")]
    found.append(sw.plan(Model(), batch(ROWS), machine="2xcpu", micro_batches=(2,), stages=(1,)))
    assert found[-1].micro_batches == 2
    return [sw.Plan.of(plan).to_json() for plan in found]


def test_smaller_batches_train_and_evaluate_as_on_one_device():
    run_ranks(2, _smaller, plans())


def _smaller(texts):
    for text in texts:
        plan = sw.Plan.from_json(text)
        model = Model()
        module = sw.parallelize(Model(), plan, batch="global")
        serial, parallel = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, module))
        # Four are as many rows as a rank's part has, and one leaves a rank without any.
        for step, rows in enumerate((ROWS, 3, 4, ROWS, 1, 3)):
            given = batch(rows, step)
            serial.zero_grad()
            expected = model(*given)
            expected.backward()
            serial.step()
            if step % 2:
                loss = module.train_step(parallel, given)
            else:
                parallel.zero_grad()
                loss = module(*given)
                loss.backward()
                parallel.step()
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for name, parameter in module.named_parameters():
            right = model.get_parameter(name)
            torch.testing.assert_close(whole(parameter), right, rtol=1e-9, atol=1e-11)
        module.eval()
        torch.testing.assert_close(module(*batch(5)), model.eval()(*batch(5)))


def test_samplers_deal_out_what_ranks_read():
    run_ranks(2, _dealt, plans())


def _dealt(texts):
    found = []
    for text in texts:
        module = sw.parallelize(Model(), sw.Plan.from_json(text), batch="local")
        dealt = module.sampler_kwargs
        sampler = DistributedSampler(range(ROWS), shuffle=False, **dealt)
        mine = [x[list(sampler)] for x in batch(ROWS)]
        torch.testing.assert_close(module(*mine), Model()(*batch(ROWS)))
        found.append(dealt)
    rank = torch.distributed.get_rank()
    assert found[:2] == [{"num_replicas": 2, "rank": rank}] * 2
    assert found[2] == {"num_replicas": 1, "rank": 0}, "tensor parallel ranks read the same"


def test_calls_are_what_was_declared():
    run_ranks(2, _declared, plans()[0])


def _declared(text):
    plan, rank = sw.Plan.from_json(text), torch.distributed.get_rank()
    expected, module = Model()(*batch(ROWS)), sw.parallelize(Model(), plan, batch="local")
    mine = [x[rank::2] for x in batch(ROWS)]  # as a DistributedSampler deals them out
    torch.testing.assert_close(module(*mine), expected)
    few = [x[rank::2] for x in batch(6)]
    torch.testing.assert_close(module(*few), Model()(*batch(6)))
    with pytest.raises(BatchError, match="each rank passes its part, 4 rows of 8"):
        module(*batch(ROWS))
    module = sw.parallelize(Model(), plan, batch="global")
    with pytest.raises(BatchError, match="differs between ranks"):
        module(*mine)
    module = sw.parallelize(Model(), plan)  # by its shape
    torch.testing.assert_close(module(*mine), expected)
    torch.testing.assert_close(module(*batch(ROWS)), expected)
    torch.testing.assert_close(module(*batch(3)), Model()(*batch(3)))
    with pytest.raises(BatchError, match=r"x has shape \[9, 6\]"):
        module(*batch(9))
    with pytest.raises(BatchError, match=r"x has shape \[3, 5\]"):
        module(torch.zeros(3, 5).double(), batch(3)[1])
