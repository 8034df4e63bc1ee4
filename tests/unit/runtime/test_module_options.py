"""Values of a module's tensors, with and without memory."""

import pytest
import torch
from torch import nn

from shardwright.ir.plan import PlanError
from shardwright.runtime.deferred.sources import deferred
from shardwright.runtime.module_options import ModuleOptions

SECOND_ROW = ((1, 2), (0, 3))


def made():
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def test_tensors_without_memory_have_the_values_that_their_module_gives_them():
    expected = made().weight
    model = deferred(made)
    assert model.weight.is_meta
    options = ModuleOptions.of(model, torch.device("cpu"))
    assert torch.equal(options.valued("weight", model.weight), expected)
    assert torch.equal(options.tile("weight", model.weight, SECOND_ROW), expected[1:2])


def test_tensors_with_memory_are_taken_as_they_are_and_others_need_a_source():
    model = made()
    options = ModuleOptions.of(model, torch.device("cpu"))
    assert options.valued("weight", model.weight) is model.weight
    tile = options.tile("weight", model.weight, SECOND_ROW)
    assert tile.data_ptr() == model.weight[1].data_ptr() and tile.shape == (1, 3)
    with pytest.raises(PlanError, match="weight is on the meta device and has no values"):
        options.valued("weight", model.weight.to("meta"))
