"""Names and positions in the calls of experts, against the operator's own signature."""

import json

import torch

from shardwright.rules.operators import steps
from shardwright.tracing.export import operators as operators
from shardwright.tracing.own_operators.experts import run_steps


def test_positions_are_those_of_the_operator():
    names = [one.name for one in torch.ops.shardwright.experts.default._schema.arguments]
    assert names[steps.EXPERTS_TURNED] == "turned"
    assert names[steps.EXPERTS_PRODUCT] == "product"
    assert names[steps.EXPERTS_STEPS] == "between"
    assert names[steps.EXPERTS_BIASES] == ["up_bias", "down_bias"]


def test_parts_are_chunks_or_every_nth_element():
    x = torch.arange(6)
    for kind, expected in ((steps.PART, [3, 4, 5]), (steps.EVERY, [1, 3, 5])):
        found = run_steps(json.loads(json.dumps([[kind, [{"value": 0}, 1, 2], {}]])), x)
        assert found.tolist() == expected
