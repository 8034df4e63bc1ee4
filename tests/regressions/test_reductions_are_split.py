"""Deviations and norms of whole tensors, which every device computed alone.

`x.std()` or `x.norm()` made every device gather all of `x`, though they are made of sums. Now
variances, and norms of p 1 and 2, are; gradients at zero are torch's.
"""

import copy

import pytest
import torch
from torch import nn

from shardwright.rules.analysis import splittable
from tests.uneven import check_on_two_ranks
from tests.zoo.subject import Subject

WHOLE = ("std", "var", "std_mean", "var_mean", "linalg_vector_norm", "norm")


class Reduced(nn.Module):
    def __init__(self, function, values):
        super().__init__()
        self.w, self.function = nn.Parameter(values.clone()), function

    def forward(self, y):
        found = self.function(self.w * y)
        found = found if isinstance(found, tuple) else (found,)
        return sum((one * (k + 2.0)).sum() for k, one in enumerate(found))


CASES = {
    "std": lambda x: x.std(),
    "std, biased": lambda x: x.std([0, 1], correction=0, keepdim=True),
    "var": lambda x: x.var([0, 1], correction=3),
    "std_mean": lambda x: torch.std_mean(x),
    "var_mean": lambda x: torch.var_mean(x),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
}
_values = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
_column = _values.clone()
_column[:, 2], _column[:, 3], _column[4] = 0.1, 0.0, 0.0
_nan = _values.clone()
_nan[3, 2] = float("nan")
VALUES = {
    "any": _values,
    "zeros": torch.zeros(9, 7),
    "equal": torch.full((9, 7), 0.1),
    "columns": _column,
    "nan": _nan,
}
Y = {"y": torch.ones(9, 7)}


@pytest.mark.parametrize("name", CASES)
def test_a_reduction_is_that_of_the_module(name):
    one = Subject(Reduced(CASES[name], _values), Y)
    assert not {op.kind for op in one.graph.ops} & set(WHOLE)
    size = {name: tensor.num_elements for name, tensor in one.graph.tensor.items()}
    sums = [op for op in one.graph.ops if op.kind == "sum" and size[op.operands[0]] > 1]
    assert sums
    assert all(splittable(one.analysis.rules[op.name]) for op in sums)
    for values in VALUES.values():
        model = Reduced(CASES[name], values).double()
        one.weights = dict(copy.deepcopy(model).named_parameters())
        loss = model(Y["y"].double())
        loss.backward()
        found = one.run(one.one_device())
        close = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
        torch.testing.assert_close(found["loss"], loss.detach(), **close)
        torch.testing.assert_close(found["gradient of w"].reshape(9, 7), model.w.grad, **close)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.var(0), lambda x: x.norm(3), lambda x: x.half().std().float()],
)
@pytest.mark.filterwarnings("ignore")
def test_what_sums_do_not_give_or_is_split_otherwise_stays_one_operator(function):
    one = Subject(Reduced(function, _values), Y)
    assert {op.kind for op in one.narrow.ops} & set(WHOLE)


@pytest.mark.ranks
def test_uneven_tiles_on_two_ranks_give_what_one_device_gives():
    check_on_two_ranks(
        {
            f"{name} {key}": Subject(Reduced(lambda_of, VALUES[key]), Y)
            for name, lambda_of in CASES.items()
            for key in ("any",)
        }
    )
