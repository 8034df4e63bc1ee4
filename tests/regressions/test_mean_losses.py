"""Losses with `reduction="mean"` that every device computed whole.

A mean of the means of uneven tiles is another number, so no rule was found for `kl_div`, the margin
losses and their kind, and a loss that is easily split made every device gather its whole batch.
Now they are a sum of terms and a count.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.rules.analysis import analyze
from tests.harness.small_graphs import splittable
from tests.harness.uneven_tiles import check_on_two_ranks
from tests.zoo.subject import Subject

_generator = torch.Generator().manual_seed(0)


def _f(*shape):
    return torch.randn(*shape, generator=_generator)


class Loss(nn.Module):
    def __init__(self, function, reduction):
        super().__init__()
        self.w, self.function, self.reduction = nn.Parameter(_f(9, 7)), function, reduction

    def forward(self, y, z=None):
        others = (y,) if z is None else (y, z)
        return self.function(self.w, *others, reduction=self.reduction)


SIGNS = torch.sign(_f(9, 7))
CASES = {
    "kl_div": (lambda w, y, **k: F.kl_div(w.log_softmax(1), y, **k), {"y": _f(9, 7).softmax(1)}),
    "soft_margin_loss": (F.soft_margin_loss, {"y": SIGNS}),
    "hinge_embedding_loss": (F.hinge_embedding_loss, {"y": SIGNS}),
    "margin_ranking_loss": (F.margin_ranking_loss, {"y": _f(9, 7), "z": SIGNS}),
    "cosine_embedding_loss": (F.cosine_embedding_loss, {"y": _f(9, 7), "z": SIGNS[:, 0]}),
    "poisson_nll_loss": (F.poisson_nll_loss, {"y": _f(9, 7).abs()}),
    "triplet_margin_loss": (F.triplet_margin_loss, {"y": _f(9, 7), "z": _f(9, 7)}),
    "multilabel_margin_loss": (
        F.multilabel_margin_loss,
        {"y": torch.tensor([[1, 2, -1, 0, 0, 0, 0]] * 9)},
    ),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_split_and_is_that_of_the_module(name, reduction):
    function, batch = CASES[name]
    model = Loss(function, reduction)
    one = Subject(model, batch)
    analysis = analyze(one.graph)
    assert not analysis.unknown
    (op,) = (op for op in one.graph.ops if op.kind == name)
    assert splittable(analysis.rules[op.name])
    alone = copy.deepcopy(model).double()
    loss = alone(**one.batch)
    loss.backward()
    found = one.run(one.one_device())
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-13, atol=1e-13)
    gradient = found["gradient of w"].reshape(9, 7)
    torch.testing.assert_close(gradient, alone.w.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:reduction")
def test_uneven_tiles_on_two_ranks_give_what_one_device_gives():
    check_on_two_ranks(
        {name: Subject(Loss(f, "mean"), batch) for name, (f, batch) in CASES.items()}
    )
