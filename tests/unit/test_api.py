"""Wrong arguments of the Python functions are errors of this project that name the argument.

Such values used to be exceptions from somewhere inside, or passed: a constraint that is a number, a
job of nan steps, a batch given as a tensor.
"""

import math
from functools import cache

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.frontier import MemoryLimitError
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.plan_options import OptionsError
from shardwright.ir.plan import PlanError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.model import MachineError
from shardwright.planner.arguments import GraphError
from shardwright.rules.user_rules import RuleError
from shardwright.tracing.call import CaptureError
from shardwright.train.data.batch import JobError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sum()


X = torch.ones(8, 4)
JOB = {"model": Model, "batch": (X,), "optimizer": torch.optim.SGD, "data": [(X,)], "steps": 3}


@cache
def graph():
    return sw.capture(Model(), (X,))


@pytest.mark.parametrize(
    "argument, error",
    [
        ({"constraints": 3}, ConstraintError),
        ({"constraints": [3]}, ConstraintError),
        ({"constraints": "mesh dp=2"}, ConstraintError),
        ({"stages": 2}, PipelineError),
        ({"stages": ()}, PipelineError),
        ({"stages": (0,)}, PipelineError),
        ({"stages": (1.5,)}, PipelineError),
        ({"micro_batches": 2}, OptionsError),
        ({"micro_batches": (-1,)}, OptionsError),
        ({"micro_batches": "some"}, OptionsError),
        ({"allow_async": "no"}, OptionsError),
    ],
)
def test_plan_and_search(argument, error):
    (name,) = argument
    with pytest.raises(error, match=name.rstrip("s")):
        sw.plan(Model(), (X,), machine="2xcpu", **argument)
    with pytest.raises(error, match=name.rstrip("s")):
        sw.search(graph(), "2xcpu", **argument)


@pytest.mark.parametrize(
    "argument, error",
    [
        ({"seconds": math.nan}, OptionsError),
        ({"seconds": "1"}, OptionsError),
        ({"seconds": -1}, OptionsError),
        ({"exact": 1}, OptionsError),
        ({"recompute": None}, OptionsError),
        ({"progress": 3}, OptionsError),
        ({"meshes": "dp=2"}, ConstraintError),
        ({"memory_limit": "40"}, MemoryLimitError),
    ],
)
def test_search_alone(argument, error):
    (name,) = argument
    with pytest.raises(error, match=name.removesuffix("_limit")):
        sw.search(graph(), "2xcpu", **argument)


def test_what_is_no_model_no_graph_no_plan_and_no_call():
    plan = sw.plan(Model(), (X,), machine="1xcpu")
    with pytest.raises(
        CaptureError, match=r"model is the class Model; give a module of it, as Model\(\)"
    ):
        sw.verify(Model, plan)  # parallelize takes what builds a model, and so a class
    for call in (sw.verify, sw.parallelize):
        with pytest.raises(PlanError, match=r"plan is a str; give a Plan"):
            call(Model(), "plan.json")
    with pytest.raises(GraphError, match=r"graph is a Model; give what sw.capture"):
        sw.search(Model(), "2xcpu")
    with pytest.raises(CaptureError, match=r"args is a Tensor; .* as in args=\(x,\)"):
        sw.capture(Model(), X)
    with pytest.raises(CaptureError, match=r"kwargs is a list; "):
        sw.capture(Model(), (), [X])
    with pytest.raises(PlanError, match=r"device is 'gpu'; give a torch.device"):
        sw.parallelize(Model(), plan, device="gpu")
    with pytest.raises(PlanError, match="seed is '1'; give a whole number"):
        sw.parallelize(Model(), plan, seed="1")
    assert sw.parallelize(Model(), plan, device="cpu")(X).shape == ()


@pytest.mark.parametrize("value", [None, 3, b"8xH100", ["8xH100"]])
def test_machines_plans_and_rules(value):
    for read, error in ((sw.Machine.preset, MachineError), (sw.Machine.load, MachineError)):
        with pytest.raises(error, match="machine"):
            read(value)
    with pytest.raises(PlanError, match="cannot read plan"):
        sw.Plan.load(value)
    with pytest.raises(RuleError, match="give two texts"):
        sw.rule(value, "a -> a")


@pytest.mark.parametrize("devices", [0, -1, "2", 1.5, True])
def test_numbers_of_devices(devices):
    with pytest.raises(MachineError, match="devices"):
        sw.Machine.preset("8xH100").with_devices(devices)
    with pytest.raises(MachineError, match="devices to measure"):
        sw.Machine.measure(devices)


@pytest.mark.parametrize(
    "name, value",
    [
        *(("steps", value) for value in (math.nan, 1.5, "3", True, 0)),
        *(("accumulate", 1.5), ("evaluate_every", "x"), ("workers", -1), ("workers", None)),
        *(("seed", "x"), ("seed", 2**64), ("clip_norm", "x"), ("clip_norm", math.nan)),
        *(("tokens", 3), ("collate", "x"), ("shapes", 3), ("padding", 0), ("weights", 3)),
        *(("shuffle", "no"), ("compiled", 1), ("name", 3), ("data", "x"), ("evaluation", b"x")),
    ],
)
def test_fields_of_a_job(name, value):
    with pytest.raises(JobError, match=rf"^Job\.{name} "):
        sw.Job(**{**JOB, name: value})
