"""Captures that tests remember are those of equal calls, and of no other."""

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing import capture as capturing
from tests.harness import captures, torch_speed
from tests.harness.ranks import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.power = nn.Linear(3, 4), nn.Linear(4, 2), 2
        self.shift = torch.arange(4.0)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)) + self.shift).pow(self.power).mean()


def made():
    torch.manual_seed(0)
    return Net()


def edited(change):
    model = made()
    change(model)
    return model


def counted(patch):
    """A list of the models that are captured from now on."""
    found, capture = [], capturing._captured

    def noted(model, *given):
        found.append(model)
        return capture(model, *given)

    patch.setattr(capturing, "_captured", noted)
    return found


def test_copies_are_captured_once_and_anything_else_anew(monkeypatch):
    done, x = counted(monkeypatch), torch.ones(2, 3)
    model = made()
    with captures.remembered():
        graph = sw.capture(model, (x,))
        for one in (model, copy.deepcopy(model), made()):
            assert sw.capture(one, (torch.zeros(2, 3, device="meta"),)) == graph
        assert done == [model]
        others = [
            partial(sw.capture, made().eval(), (x,)),
            partial(sw.capture, made().double(), (x.double(),)),
            partial(sw.capture, made(), (torch.ones(4, 3),)),
            partial(sw.capture, made(), (x.clone().requires_grad_(),)),
            partial(sw.capture, made(), (x,), precision="bf16"),
            partial(sw.capture, edited(lambda m: setattr(m, "power", 3)), (x,)),
            partial(sw.capture, edited(lambda m: m.shift.zero_()), (x,)),
            partial(sw.capture, edited(lambda m: m.up.bias.requires_grad_(False)), (x,)),
            partial(sw.capture, edited(lambda m: setattr(m.up, "bias", None)), (x,)),
        ]
        for number, capture in enumerate(others, 2):
            capture()
            assert len(done) == number
        with captures.remembered():  # in another folder
            sw.capture(model, (x,))
        with captures.remembered(captures.folder()):  # as another process
            sw.capture(model, (x,))
        assert len(done) == len(others) + 2


def shifted(by):
    torch.manual_seed(0)
    model = Net()
    model.shift = torch.arange(4.0) * by
    return model


def test_constants_without_memory_are_those_of_each_model(monkeypatch):
    done, x = counted(monkeypatch), torch.ones(2, 3)
    plan, counts = sw.plan(made(), (x,), machine="1xcpu"), []
    with captures.remembered():
        for by in (2, 3):  # `shift` has no memory until it is read, from a recording of its model
            module = sw.parallelize(partial(shifted, by), plan)
            torch.testing.assert_close(module(x), shifted(by)(x))
            counts.append(len(done))
    assert counts[0] == counts[1]


def test_what_belongs_to_one_model_is_not_given_to_another(monkeypatch):
    done, x = counted(monkeypatch), torch.ones(2, 3)
    with captures.remembered():
        functions = [edited(lambda m: setattr(m, "odd", lambda: 1)) for _ in range(2)]
        for model in functions:
            sw.capture(model, (x,))
    assert done == functions


def test_a_class_that_does_something_else_is_captured_anew(monkeypatch):
    done, x = counted(monkeypatch), torch.ones(2, 3)
    with captures.remembered():
        first = sw.capture(made(), (x,))
        monkeypatch.setattr(Net, "forward", lambda self, x: self.down(self.up(x)).mean())
        assert sw.capture(made(), (x,)) != first
    assert len(done) == 2


def test_torch_looks_operators_up_again_only_after_one_is_registered(monkeypatch):
    utils, calls = torch._export.utils, []
    look_up = inspect.unwrap(utils._materialize_cpp_cia_ops)
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", lambda: calls.append(1) or look_up())
    torch_speed.speed_up()
    before = utils._collect_all_valid_cia_ops()
    assert before == utils._collect_all_valid_cia_ops() and len(calls) == 1
    library = torch.library.Library("shardwright_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    assert utils._collect_all_valid_cia_ops() - before == {
        torch.ops.shardwright_tests.twice.default
    }
    assert len(calls) == 2


def captured_on_ranks():
    """Captures of this rank: after a call that its test knows, and after one that it does not."""
    with pytest.MonkeyPatch.context() as patch:
        done, found = counted(patch), []
        for model in (made(), made().eval()):
            sw.capture(model, (torch.ones(2, 3),))
            found.append(len(done))
    return found


@pytest.mark.ranks
def test_one_process_captures_for_all_ranks():
    with captures.remembered():
        sw.capture(made(), (torch.ones(2, 3),))
        one, other = run_ranks(2, captured_on_ranks)
    assert one[0] == other[0] == 0
    assert one[1] + other[1] == 1
