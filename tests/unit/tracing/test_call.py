"""Calls taken apart into paths and put together again; what a model returned, named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.plan import InputSpec
from shardwright.tracing.call import (
    CaptureError,
    example_call,
    flatten,
    rebuild_outputs,
    select_outputs,
    split_call,
    unflatten,
)

keys = st.from_regex(r"[a-z_][a-z0-9_]{0,3}", fullmatch=True)
trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, min_size=1, max_size=3)
    ),
)
SCALAR, VECTOR = torch.tensor(1.0), torch.ones(3)


@given(st.lists(trees, max_size=3).map(tuple), st.dictionaries(keys, trees, max_size=3))
def test_a_call_is_put_together_as_it_was(args, kwargs):
    assert unflatten(flatten(args, kwargs)) == (args, kwargs)


def test_lists_come_back_as_tuples_and_longer_than_nine_in_order():
    args, _ = unflatten(flatten([list(range(12))], {}))
    assert args == (tuple(range(12)),)


def test_tensors_and_constants_are_told_apart():
    tensors, constants = split_call((VECTOR, 3), {"mask": None, "pair": (SCALAR, "mean")})
    assert list(tensors) == ["args.0", "kwargs.pair.0"]
    assert constants == {"args.1": 3, "kwargs.mask": None, "kwargs.pair.1": "mean"}


@pytest.mark.parametrize(
    "value, message",
    [
        (object(), "argument kwargs.x is a object; the example call may hold tensors, None,"),
        (torch.device("cpu"), "argument kwargs.x is a device"),
        ({"a.b": 1}, "kwargs.x has the key 'a.b'; keys must be text without dots"),
        ({1: 2}, "kwargs.x has the key 1; keys must be text without dots"),
    ],
)
def test_other_arguments_are_refused_by_name(value, message):
    with pytest.raises(CaptureError) as refused:
        split_call((), {"x": value})
    assert message in str(refused.value)


def test_a_planned_call_is_made_of_meta_tensors():
    specs = (InputSpec("args.0", (5, 7), "int64"), InputSpec("kwargs.y.0", (), "float32"))
    args, kwargs = example_call(specs, (("kwargs.y.1", True),))
    assert args[0].shape == (5, 7) and args[0].dtype == torch.int64 and args[0].is_meta
    assert kwargs["y"][0].shape == () and kwargs["y"][1] is True


@pytest.mark.parametrize(
    "returned, names, again",
    [
        (VECTOR, ("",), VECTOR),
        ({"logits": VECTOR, "loss": SCALAR}, ("",), SCALAR),
        ((SCALAR, VECTOR), ("",), SCALAR),
        ((VECTOR, SCALAR), ("0", "1"), (VECTOR, SCALAR)),
        ([VECTOR, None], ("0",), (VECTOR,)),
        ({"a": VECTOR, "b": None, "c": SCALAR}, ("a", "c"), {"a": VECTOR, "c": SCALAR}),
        ({"loss": None, "logits": VECTOR}, ("logits",), {"logits": VECTOR}),
    ],
)
def test_the_loss_is_taken_and_without_one_everything(returned, names, again):
    found, tensors = select_outputs(returned)
    assert found == names
    torch.testing.assert_close(rebuild_outputs(found, tensors), again)


@pytest.mark.parametrize(
    "returned, message",
    [
        (3, "the model returned a int; return a tensor, a tuple of tensors or a dict of tensors"),
        (None, "the model returned a NoneType"),
        ((), "the model returned no tensor; return the loss, or what it is made of"),
        ({"hidden": None}, "the model returned no tensor"),
    ],
)
def test_a_model_must_return_tensors(returned, message):
    with pytest.raises(CaptureError) as refused:
        select_outputs(returned)
    assert message in str(refused.value)
