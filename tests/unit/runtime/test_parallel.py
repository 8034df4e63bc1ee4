"""What a parallel module returns if it is asked for all that the model does."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError


class Classifier(nn.Module):
    """Returns the logits besides the loss."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x, labels):
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


BATCH = {"x": torch.randn(8, 4), "labels": torch.zeros(8, dtype=torch.long)}


def plan(chunks):
    model = Classifier()
    return model, sw.search(sw.capture(model, (), BATCH), "1xcpu", loss_chunks=(chunks,))[0]


def test_all_that_the_model_returns_comes_back():
    model, found = plan(1)
    expected = model(**BATCH)
    returned = sw.parallelize(model, found, outputs="model")(**BATCH)
    assert returned.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(returned[name], value)


def test_logits_that_a_plan_never_has_are_not_returned():
    model, found = plan(2)
    with pytest.raises(PlanError, match="computes the loss in 2 chunks and never has all logits"):
        sw.parallelize(model, found, outputs="model")
    loss = sw.parallelize(model, found)(**BATCH)
    torch.testing.assert_close(loss, model(**BATCH)["loss"])
