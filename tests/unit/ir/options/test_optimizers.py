"""What is said of torch's optimizers is what they do."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.ir.options.optimizers import (
    OPTIMIZERS,
    OptimizerError,
    known_optimizer,
    optimizer_spec,
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
def test_an_update_does_what_its_spec_says(name):
    spec = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.randn(8))
    parameter.grad = torch.randn(8)
    optimizer = getattr(torch.optim, spec.torch_class)([parameter], **spec.options)
    for _ in range(8):  # the first steps of some differ
        optimizer.step()
    with Counted() as counted:
        optimizer.step()
    assert (counted.calls, counted.elements / 8) == (spec.calls, spec.passes)
    kept = [t for t in tree_leaves(optimizer.state[parameter]) if isinstance(t, torch.Tensor)]
    assert sum(t.numel() == 8 for t in kept) == spec.state_tensors


@pytest.mark.parametrize(
    "given, name",
    [
        ("AdamW", "adamw"),
        (torch.optim.RMSprop, "rmsprop"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), "sgd"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0, momentum=0.5), "sgd_momentum"),
    ],
)
def test_an_optimizer_is_known_by_name_class_or_instance(given, name):
    assert known_optimizer(given) == name


def test_an_unknown_optimizer_is_refused_with_those_that_are_known():
    with pytest.raises(OptimizerError, match=r"optimizer 'lion' is not known; use one of sgd, mom"):
        optimizer_spec("lion")
