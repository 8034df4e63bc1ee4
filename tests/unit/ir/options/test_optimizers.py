"""What is said of torch's optimizers is what they do."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.ir.options.optimizer_spec import Implementation
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
    optimizer.zero_grad()
    assert (parameter.grad is not None) == spec.keeps_gradients


def test_updates_of_matrices_concern_matrices_alone():
    muon = OPTIMIZERS["muon"]
    spec = replace(muon, matrix=replace(muon.matrix, kept=lambda rows, columns: rows + columns))
    assert (spec.kept_of((3, 4)), spec.tensors_of((3, 4))) == (7, 1)
    assert spec.kept_of((4,)) == spec.kept_of((2, 3, 4)) == 0
    assert spec.tensors_of((4,)) == 2


class Alive(TorchDispatchMode):
    """The most elements of new tensors that are alive at once."""

    def __init__(self, known):
        super().__init__()
        self.known, self.made, self.most = {t.data_ptr() for t in known}, [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        tensors = [t for ref in self.made if (t := ref()) is not None and t.numel() > 1]
        sizes = {t.data_ptr(): t.numel() for t in tensors if t.data_ptr() not in self.known}
        self.most = max(self.most, sum(sizes.values()))
        return result


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_takes_the_memory_that_its_spec_says(name, together):
    spec = OPTIMIZERS[name]
    parameters = [torch.nn.Parameter(torch.randn(8)) for _ in range(1 + together)]
    make = getattr(torch.optim, spec.torch_class)
    optimizer = make(parameters, foreach=together, **spec.options)
    for parameter in parameters:
        parameter.grad = torch.randn(8)
    for _ in range(8):
        optimizer.step()
    known = tree_leaves([*parameters, *(p.grad for p in parameters), dict(optimizer.state)])
    with Alive([t for t in known if isinstance(t, torch.Tensor)]) as alive:
        optimizer.step()
    expected = spec.foreach_temporaries if together else spec.temporaries
    assert alive.most == 8 * len(parameters) * expected


@pytest.mark.parametrize(
    "given, name",
    [
        ("AdamW", "adamw"),
        (torch.optim.RMSprop, "rmsprop"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), "sgd"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0, momentum=0.5), "sgd_momentum"),
        (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True), "adamw_fused"),
        (torch.optim.NAdam([torch.nn.Parameter(torch.ones(1))], foreach=False), "nadam_loop"),
        ("SGD_momentum_foreach", "sgd_momentum_foreach"),
    ],
)
def test_an_optimizer_is_known_by_name_class_or_instance(given, name):
    assert known_optimizer(given) == name


def test_a_spec_of_a_known_name_and_an_implementation_that_torch_has_not_are_refused():
    known = optimizer_spec("adamw_fused")
    assert known.runs(plain=True, on_gpu=True) is Implementation.FUSED
    with pytest.raises(OptimizerError, match="known already"):
        known_optimizer(known)
    with pytest.raises(OptimizerError, match="'nadam_fused' is not known"):
        optimizer_spec("nadam_fused")


def test_an_unknown_optimizer_is_refused_with_those_that_are_known():
    with pytest.raises(OptimizerError, match=r"optimizer 'lion' is not known; use one of sgd, mom"):
        optimizer_spec("lion")


def test_torch_updates_all_plain_tensors_at_once_on_a_gpu_alone():
    spec = OPTIMIZERS["adamw"]
    found = {
        (plain, on_gpu): spec.runs(plain=plain, on_gpu=on_gpu)
        for plain in (True, False)
        for on_gpu in (True, False)
    }
    assert [at for at, one in found.items() if one is Implementation.FOREACH] == [(True, True)]
    assert {*found.values()} == {Implementation.FOREACH, Implementation.LOOP}
    asked = replace(spec, implementation=Implementation.LOOP)
    assert asked.runs(plain=True, on_gpu=True) is Implementation.LOOP
