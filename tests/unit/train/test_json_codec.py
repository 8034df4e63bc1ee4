import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.train.json_codec import ValueFormatError, from_json, to_json

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text()
values = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=8,
)


@given(values)
def test_values_come_back_as_they_were(value):
    back = from_json(json.loads(json.dumps(to_json(value))))
    assert back == value
    assert repr(back) == repr(value)  # which tells 1 from 1.0 and a list from a tuple


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back_bit_by_bit(dtype, shape):
    tensor = torch.arange(6)[: torch.Size(shape).numel()].view(shape).to(dtype)
    back = from_json(json.loads(json.dumps(to_json({"t": tensor}))))["t"]
    assert back.dtype == dtype and torch.equal(back, tensor)


def test_counters_stay_counters_and_a_users_own_mark_does_no_harm():
    value = {"milestones": Counter({30: 2}), "own": {"~": "tuple"}}
    back = from_json(json.loads(json.dumps(to_json(value))))
    assert back == value and type(back["milestones"]) is Counter


def test_what_cannot_be_held_is_named():
    with pytest.raises(ValueFormatError, match=r"cannot hold a builtins.function; it holds"):
        to_json({"f": [to_json]})


@pytest.mark.parametrize(
    "text",
    [
        '{"~": "code", "items": []}',
        '{"~": "tuple"}',
        '{"~": "dict", "items": [1]}',
        '{"~": "tensor", "dtype": "load", "shape": [], "data": ""}',
        '{"~": "tensor", "dtype": "int64", "shape": [9], "data": "AAAA"}',
        '{"~": "tensor", "dtype": "uint8", "shape": [-1], "data": "?"}',
    ],
)
def test_damaged_values_are_refused(text):
    with pytest.raises(ValueFormatError):
        from_json(json.loads(text))
