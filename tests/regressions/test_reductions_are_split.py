"""Deviations, norms, extrema and products of whole tensors, which every device computed alone.

`x.std()` or `x.norm()` made every device gather all of `x`, though they are made of sums. Now
variances, and norms of p 1 and 2, are; gradients at zero are torch's. `x.max()`, `x.prod()` and a
`logsumexp` over split logits gathered all of `x` too. Now devices agree on a few numbers; gradients
are torch's where several elements are the largest, or zero.
"""

import copy

import pytest
import torch
from torch import nn

from shardwright.rules.micro_batches import MicroBatchError, micro_batches
from tests.harness.graph_comparison import compared
from tests.harness.small_graphs import splittable
from tests.harness.uneven_tiles import check_on_two_ranks
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
JOINT = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin of columns": lambda x: x.amin(0),
    "amax of rows": lambda x: x.amax(-1, keepdim=True),
    "aminmax": torch.aminmax,
    "aminmax of rows": lambda x: torch.aminmax(x, dim=1),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "logsumexp of rows": lambda x: x.logsumexp(1, keepdim=True),
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(1),
}
_values = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
_column = _values.clone()
_column[:, 2], _column[:, 3], _column[4] = 0.1, 0.0, 0.0
_nan = _values.clone()
_nan[3, 2] = float("nan")
_signs = torch.where(_values > 0, 1.0, -1.0)
_single = _signs.clone()
_single[2, 5] = 0.0
VALUES = {
    "any": _values,
    "zeros": torch.zeros(9, 7),
    "equal": torch.full((9, 7), 0.1),
    "columns": _column,
    "nan": _nan,
}
EXTREME = {**VALUES, "signs": _signs, "one zero": _single}
TRIED = {
    "max": ("any", "signs", "nan"),
    "amax": ("signs", "nan"),
    "prod": ("any", "columns", "one zero", "nan"),
    "prod of rows": ("one zero",),
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


@pytest.mark.parametrize("name", JOINT)
def test_an_extremum_or_product_may_be_split_along_what_it_reduces(name):
    one = Subject(Reduced(JOINT[name], _values), Y)
    kinds = {"aminmax": ("amin", "amax")}.get(name.split()[0], (name.split()[0],))
    found = [op for op in one.graph.ops if op.kind in kinds]
    assert len(found) == len(kinds)
    for op in found:
        rule = one.analysis.rules[op.name]
        assert sorted(rule.factor[factor].size for factor in splittable(rule)) == [7, 9]
    model = Reduced(JOINT[name], EXTREME["columns"]).double()
    assert compared(model, {"y": Y["y"].double()}).ok


def test_micro_batches_cannot_agree_on_a_maximum():
    one = Subject(Reduced(lambda x: x.max() * x.sum(), _values[:, :1]), {"y": torch.ones(9, 7)})
    with pytest.raises(MicroBatchError, match=r"max in .* needs the whole batch"):
        micro_batches(one.graph, one.analysis, 3)


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
    subjects = {name: Subject(Reduced(one, _values), Y) for name, one in CASES.items()}
    for name, one in JOINT.items():
        subject = Subject(Reduced(one, _values), Y)
        for key in TRIED.get(name, ("columns",)):
            other = subjects[f"{name} {key}"] = copy.copy(subject)
            other.weights = dict(Reduced(one, EXTREME[key].double()).named_parameters())
    check_on_two_ranks(subjects)
