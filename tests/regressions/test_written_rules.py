"""Written rules that were not true, or that crashed, each without a word to the user.

A search of PyTorch's operator database found them: a shift by `F.pad`, which keeps its size, was
split as if it were elementwise; instance norm with running statistics left each rank those of its
tile; `native_batch_norm` returned the deviation
of a population. Reductions of a number, `prelu` with one slope and grouped convolutions without a
batch dimension ended in a traceback. Names of schedules and collectives that nobody knows were
taken for others. Each now is exact or one clear error.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwright.capture.call import CaptureError
from shardwright.capture.capture import capture_call
from shardwright.capture.operators import call_op
from shardwright.cost.collectives import step_price
from shardwright.cost.passes import orders
from shardwright.cost.topology import links
from shardwright.ir.layout import Mesh
from shardwright.ir.machine import Machine
from shardwright.ir.pipeline import Pipeline, PipelineError
from shardwright.rules.analysis import analyze, splittable
from shardwright.rules.arguments import localize
from shardwright.runtime.collectives import collected
from tests.property.operators import call, f


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(x * self.weight)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_a_dimension_that_is_shifted_is_whole(mode):
    one = call("pad.default", f(5, 6, 7), [1, -1], mode)
    rule = analyze(one.graph).rules["y"]
    assert splittable(rule) == ("d0", "d1")


def test_statistics_of_instance_norm_are_those_of_the_whole_batch():
    norm = nn.InstanceNorm1d(6, track_running_stats=True).double()
    captured = capture_call(Calls(norm), (torch.randn(4, 6, 5, dtype=torch.float64),))
    assert {name for name, _ in captured.graph.updates} == {
        "function.running_mean",
        "function.running_var",
    }


def test_instance_norm_by_its_operator_is_refused():
    """`F.instance_norm` is computed by its formula; who calls the operator itself bypasses that."""
    mean, variance = torch.zeros(6).double(), torch.ones(6).double()
    model = Calls(
        lambda x: torch.instance_norm(x, None, None, mean, variance, True, 0.1, 1e-5, False)
    )
    with pytest.raises(CaptureError, match="track_running_stats"):
        capture_call(model, (torch.randn(4, 6, 5).double(),))


def test_raw_batch_norm_returns_the_deviation_that_it_divided_by():
    def deviation(x):
        return torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[2]

    x = torch.randn(4, 6, dtype=torch.float64)
    captured = capture_call(Calls(deviation), (x,))
    values = {"weight": torch.tensor(1.5, dtype=torch.float64), "args.0": x}
    for op in captured.graph.ops:
        values.update(zip(op.outputs, call_op(op, values, torch.device("cpu")), strict=True))
    torch.testing.assert_close(values[captured.graph.outputs[0]], deviation(x * 1.5))


@pytest.mark.parametrize(
    "one",
    [
        call("sum.dim_IntList", f(), [0]),
        call("amax.default", f(), [0]),
        call("prod.dim_int", f(), 0),
        call("flip.default", f(), [0]),
        call("gather.default", f(), 0, torch.tensor([0])),
        call("prelu.default", f(5, 7), f()),
    ],
    ids=lambda one: one.name,
)
def test_numbers_have_rules(one):
    analyze(one.graph)


@pytest.mark.parametrize(
    "one",
    [
        call("conv1d.default", f(6, 11), f(9, 2, 3), f(9), [1], [1], [1], 3),
        call("conv_transpose1d.default", f(6, 11), f(6, 3, 3), f(9), [1], [0], [0], 3),
    ],
    ids=lambda one: one.name,
)
def test_a_convolution_without_batch_dimension_keeps_its_groups(one):
    shapes = [tuple(value.shape) for value in one.values.values()]
    results = [tuple(result.shape) for result in one.results]
    assert localize(one.op, results, shapes, results).args[6] == 3


def test_a_schedule_that_is_not_known_is_an_error():
    with pytest.raises(PipelineError, match="'1F2B' is none of GPipe"):
        Pipeline(("a",), "1F2B", 2)
    with pytest.raises(PipelineError, match="'1F2B' is none of GPipe"):
        orders("1F2B", 2, 2, 4)


def test_a_collective_that_is_not_known_is_an_error():
    group = SimpleNamespace(get_group=lambda: None)
    with pytest.raises(ValueError, match="no collective"):
        collected(torch.ones(2), SimpleNamespace(collective="broadcast"), group)
    machine = Machine.preset("2xcpu")
    link = links(machine, Mesh.parse("dp=2"))[0]
    with pytest.raises(ValueError, match="no collective"):
        step_price("broadcast", link, machine)
