"""State of optimizers as values for JSON and as tensors, by names of parameters."""

import pytest
import torch
from torch import nn

from shardwright.train.checkpoint.optimizer_state import allocate, facts_of, tensors_of
from shardwright.train.checkpoint.reading import CheckpointError


def stepped(*shapes):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters, lr=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer, parameters


def test_a_tile_without_elements_keeps_its_state_and_a_placeholder_has_none():
    """A rank may have no rows of a parameter; a stage without parameters has a placeholder."""
    optimizer, (whole, rows, _) = stepped((2, 3), (0, 3), (0,))
    names = {id(whole): "whole", id(rows): "rows"}
    keys = {"exp_avg", "exp_avg_sq", "step"}
    expected = {f"{name}/{key}" for name in ("whole", "rows") for key in keys}
    facts = facts_of(optimizer, names)
    assert {*tensors_of(optimizer, names)} == expected
    assert facts["members"] == [["whole", "rows"]]
    assert {name: {*state} for name, state in facts["state"].items()} == dict.fromkeys(
        ("whole", "rows"), keys
    )
    made = allocate(optimizer, names, facts)
    assert {*made} == expected
    assert made["rows/exp_avg"].shape == (0, 3) and optimizer.state.keys() == {whole, rows}


def test_a_parameter_that_is_not_of_the_module_is_refused():
    optimizer, (known, _) = stepped((2,), (3,))
    for function in (tensors_of, facts_of):
        with pytest.raises(CheckpointError, match=r"of shape \(3,\) that is not of the module"):
            function(optimizer, {id(known): "known"})
