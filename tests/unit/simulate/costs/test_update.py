"""What an update costs, and that what is said of torch's optimizers is what they do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.machine.efficiency_curve import Curve
from shardwright.machine.model import Efficiency, Machine
from shardwright.planner.tables.memory import STATE_TENSORS
from shardwright.simulate.costs.update import UPDATES, update_seconds

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
DEVICE = replace(
    Machine.preset("2xcpu").device,
    bytes_per_s=1024.0,
    launch_seconds=1.0,
    dispatch_seconds=4.0,
    parameter_seconds=16.0,
    efficiency=Efficiency(memory=0.25, update=0.5),
)


class Counted(TorchDispatchMode):
    """Operators on tensors of more than one element, and the elements that they read and write."""

    def __init__(self):
        super().__init__()
        self.calls = self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        every = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        sizes = [t.numel() for t in every if t.numel() > 1]
        if sizes and function is not torch.ops.aten.detach.default:
            self.calls += 1
            self.elements += sum(sizes)
        return result


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_runs_as_many_operators_as_is_said(name):
    parameter = torch.nn.Parameter(torch.randn(8))
    parameter.grad = torch.randn(8)
    optimizer = OPTIMIZERS[name]([parameter])
    for _ in range(8):  # the first steps of some differ
        optimizer.step()
    with Counted() as counted:
        optimizer.step()
    assert (counted.calls, counted.elements / 8) == UPDATES[name]


def test_every_optimizer_whose_memory_is_known_has_an_update():
    assert UPDATES.keys() == STATE_TENSORS.keys()


def test_an_unmeasured_update_is_one_kernel():
    device = replace(DEVICE, dispatch_seconds=None)
    assert update_seconds(np.array([256, 512]), "adamw", device, 2).tolist() == [1 + 7, 1 + 14]
    assert update_seconds(np.array([256]), "sgd", device, 2).tolist() == [1 + 3]


def test_a_measured_update_pays_for_every_operator():
    assert update_seconds(np.array([512]), "sgd", DEVICE, 2).tolist() == [16 + 4 + 3]
    assert update_seconds(np.array([512]), "momentum", DEVICE, 2).tolist() == [16 + 3 * 4 + 8]


def test_one_rank_updates_plain_tensors():
    assert update_seconds(np.array([512]), "momentum", DEVICE, 1).tolist() == [3 * 1 + 8]


def test_how_fast_an_update_is_depends_on_what_one_operator_passes_over():
    curve = Curve(((512 * 3.0, 0.25), (2 * 512 * 3.0, 0.5)))
    device = replace(DEVICE, efficiency=Efficiency(update=curve))
    found = update_seconds(np.array([512, 1024]), "sgd", device, 2)
    assert found.tolist() == pytest.approx([16 + 4 + 6, 16 + 4 + 6])
