"""Calls of a parallel module that are not the planned call.

Users passed `pm(x, bogus=x)`, a mask that was None when the plan was made, `alpha=0.7` where the
plan had 0.5, a longer list: the call ran, and computed what the planned call would have. Data in
float64 for a plan in float32 ended in an error from within an operator. Now each is an error that
names the argument, and positional and keyword forms mean what the module's signature says.
"""

import numpy
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing.arguments import BatchError
from shardwright.tracing.call import CaptureError
from shardwright.train.step import Stepper

ONE = sw.Machine.preset("1xcpu")


class Scaled(nn.Module):
    """Takes tensors that may be missing, numbers, flags and lists."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x, y=None, *, alpha=0.5, flag=True, extra=None):
        hidden = self.up(x) * alpha
        if y is not None:
            hidden = hidden + y
        for one in extra or ():
            hidden = hidden * one
        return (hidden if flag else -hidden).square().sum() if flag else hidden.sum()


def data():
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Scaled().double()


@pytest.fixture(scope="module")
def module(model):
    return sw.parallelize(model, sw.plan(model, (data(),), machine=ONE))


@pytest.fixture(scope="module")
def listed(model):
    given = {"extra": [data(), data()], "alpha": 0.7}
    return sw.parallelize(model, sw.plan(model, (data(),), given, machine=ONE))


WRONG = {
    "unknown": (lambda x: ((x,), {"bogus": x}), "unexpected keyword argument 'bogus'"),
    "missing": (lambda x: ((), {}), "missing a required argument: 'x'"),
    "a tensor for None": (lambda x: ((x, x), {}), "y is float64[3, 4], and the plan was made with"),
    "another number": (lambda x: ((x,), {"alpha": 0.7}), "alpha is 0.7, and the plan was made"),
    "an integer": (lambda x: ((x,), {"alpha": 1}), "alpha is 1, and the plan was made with 0.5"),
    "another flag": (lambda x: ((x,), {"flag": False}), "flag is False, and the plan was made"),
    "a list": (
        lambda x: ((x,), {"extra": [x]}),
        "extra.0 is float64[3, 4], and the plan was made without",
    ),
    "dtype": (lambda x: ((x.float(),), {}), "x is float32[3, 4], and the plan is for float64"),
    "integers": (lambda x: ((x.int(),), {}), "x is int32[3, 4], and the plan is for float64[3, 4]"),
    "shape": (lambda x: ((x[:, :2],), {}), "x has shape [3, 2]; the plan is for a global batch of"),
    "more rows": (
        lambda x: ((x.repeat(2, 1),), {}),
        "x has shape [6, 4]; the plan is for a global",
    ),
    "numpy": (lambda x: ((x.numpy(),), {}), "x is a numpy array of float64"),
    "a number": (lambda x: ((1.0,), {}), "x is 1.0, and the plan is for float64[3, 4]"),
    "a gradient": (lambda x: ((x.requires_grad_(),), {}), "x requires a gradient"),
    "device": (lambda x: ((x.to("meta"),), {}), "x is on meta, and the module on cpu"),
}


@pytest.mark.parametrize("what", WRONG)
def test_another_call_is_an_error_that_names_the_argument(module, what):
    make, said = WRONG[what]
    args, kwargs = make(data())
    with pytest.raises(BatchError) as error:
        module(*args, **kwargs)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_lists_keep_their_length_and_numbers_their_value(model, listed):
    x = data()
    right = listed(x, alpha=0.7, extra=(x, x))
    torch.testing.assert_close(right, model(x, alpha=0.7, extra=[x, x]), rtol=0, atol=0)
    for kwargs, said in (
        ({"alpha": 0.7, "extra": [x]}, "extra.1 is not given"),
        ({"alpha": 0.7, "extra": [x, x, x]}, "extra.2 is float64[3, 4], and the plan was made wit"),
        ({"extra": [x, x]}, "alpha is 0.5, and the plan was made with 0.7"),
    ):
        with pytest.raises(BatchError) as error:
            listed(x, **kwargs)
        assert said in str(error.value)


def test_an_empty_list_is_refused_at_planning(model):
    with pytest.raises(CaptureError, match=r"kwargs\.extra is empty"):
        sw.capture(model, (data(),), {"extra": []})


def test_forms_of_the_same_call_are_the_same(model, module):
    x = data()
    wanted = model(x)
    for args, kwargs in (
        ((), {"x": x}),
        ((x, None), {}),
        ((x,), {"alpha": 0.5, "flag": True, "extra": None}),
        ((x.t().contiguous().t(),), {}),
        ((), {"flag": True, "y": None, "x": x}),
    ):
        torch.testing.assert_close(module(*args, **kwargs), wanted, rtol=0, atol=0)
    with torch.no_grad():  # where no gradient is asked for, none is missing
        torch.testing.assert_close(module(data().requires_grad_()), wanted, rtol=0, atol=0)


def test_steps_and_parts_of_batches_are_such_calls_too(module, listed):
    x = data()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    for batch in ({"x": x, "alpha": 0.7}, (x, x)):
        with pytest.raises(BatchError, match=r"the plan was made with"):
            module.train_step(optimizer, batch)
        with pytest.raises(BatchError, match=r"the plan was made with"):
            module.local_batch(batch)
        with pytest.raises(BatchError, match=r"the plan was made with"):
            Stepper(module).module.forward_backward(batch)
    part = listed.local_batch({"x": x, "alpha": 0.7, "extra": [x, 2 * x]})
    assert part["alpha"] == 0.7 and torch.equal(part["extra"][1], 2 * x)
    assert torch.equal(listed(**part), listed(x, alpha=0.7, extra=[x, 2 * x]))


def test_a_numpy_batch_is_refused_at_planning(model):
    with pytest.raises(CaptureError, match=r"args\.0 is a ndarray"):
        sw.capture(model, (numpy.zeros((3, 4)),))
