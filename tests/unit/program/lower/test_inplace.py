"""Operators write over operands that nobody needs, and only over those."""

import random

import pytest
import torch
from torch import nn

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.options.numerics import Numerics
from shardwright.program.decisions import everything_whole
from shardwright.program.instructions import Compute
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.rank_program import lower, verify
from shardwright.rules.analysis import analyze
from shardwright.runtime.graph_modules.fx import to_module
from shardwright.tracing.capture import capture_call
from tests.harness import models

MESH = Mesh.parse("a=1")


def programs(model, args=(), kwargs=None):
    """The captured call, and its program on one device as lowered and in place."""
    captured = capture_call(model, args, kwargs)
    graph = captured.graph
    program = lower(graph, analyze(graph), everything_whole(graph), 0)
    changed = in_place(program, graph)
    verify(changed)
    return captured, program, changed


def overwritten(program):
    """The operators that write over their operand, by the names of their results."""
    calls = [one.op for one in program.instructions if isinstance(one, Compute)]
    return {op.name for op in calls if op.target.split(".")[1].endswith("_")}


class Call(nn.Module):
    """A function of an input and a weight."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))
        self.register_buffer("kept", torch.zeros(4, 4, dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


X = torch.linspace(-2, 2, 16, dtype=torch.float64).view(4, 4).sin()
ALLOWED = {  # function of input and weight -> operators that write over their operand
    "an activation": (lambda x, w: (x @ w).relu(), {"relu"}),
    "a chain": (lambda x, w: ((x @ w).relu() + 1.0) * 2.0, {"relu", "mul"}),
    "after addmm": (lambda x, w: torch.addmm(w[0], x, w).relu(), {"relu"}),
    "after bmm": (lambda x, w: torch.bmm(x[None], w[None]).relu(), {"relu"}),
    "after cat": (lambda x, w: torch.cat([x @ w, x]).relu(), {"relu"}),
    "constant factors": (lambda x, w: (x @ w) * x, {"mul"}),
    "the last of several readers": (lambda x, w: _twice(x @ w), {"add_1"}),
    "after a view has been read": (lambda x, w: _then(x @ w, lambda y: y.t().sum()), {"add"}),
}
REFUSED = {
    "an input": lambda x, w: x.relu().sum() + w.sum(),
    "a parameter": lambda x, w: w.relu(),
    "a view of a parameter": lambda x, w: w.view(2, 8).relu(),
    "an operand that is read later": lambda x, w: _early(x @ w),
    "an operand of which a view is read later": lambda x, w: _viewed(x @ w),
    "an operand that is read twice": lambda x, w: _both(x @ w, lambda y: y),
    "an operand and its view": lambda x, w: _both(x @ w, lambda y: y.t()),
    "a view, which autograd would pay for": lambda x, w: (x @ w).view(2, 8).relu(),
    "an operand that the operator keeps": lambda x, w: nn.functional.silu(x @ w),
    "an operand that the other factor's gradient needs": lambda x, w: (x @ w) * w,
    "a result that its operator keeps": lambda x, w: (x @ w).softmax(-1) + x,
    "an operand that another keeps": lambda x, w: _squared(x @ w),
    "a smaller operand": lambda x, w: (x @ w)[:1].clone() + w,
    "an operand of another dtype": lambda x, w: ((x @ w) > 0) * w,
    "what is returned": lambda x, w: _returned(x @ w),
}


def _twice(y):
    first = y.sum()
    return y + 1.0 + first


def _then(y, reduce):
    total = reduce(y)
    return (y + 1.0).sum() + total


def _early(y):
    return y.relu().sum() + y.sum()


def _viewed(y):
    view = y.t()
    return y.relu().sum() + (view @ view).sum()


def _both(y, view):
    return torch.maximum(y, view(y))


def _squared(y):
    other = (y @ y).sum()  # keeps y
    return y.relu().sum() + other


def _returned(y):
    return y, y.relu()


@pytest.mark.parametrize("name", ALLOWED)
def test_an_operand_that_dies_is_overwritten(name):
    function, expected = ALLOWED[name]
    model = Call(function)
    captured, program, changed = programs(model, (X,))
    assert expected <= overwritten(changed)
    assert same_numbers(model, captured, program, changed, (X,))


@pytest.mark.parametrize("name", REFUSED)
def test_an_operand_that_is_needed_is_left_alone(name):
    model = Call(REFUSED[name])
    captured, program, changed = programs(model, (X,))
    whole = {op.name for op in captured.graph.ops if captured.graph.tensor[op.name].shape}
    assert not overwritten(changed) & whole
    assert same_numbers(model, captured, program, changed, (X,))


def test_a_buffers_new_content_is_not_overwritten():
    class Running(Call):
        def forward(self, x):
            new = (x @ self.weight).detach() * 0.5
            self.kept.copy_(new)
            return new.relu().sum() + self.weight.sum()

    _, _, changed = programs(Running(None), (X,))
    assert "relu" not in overwritten(changed)


def test_the_convolutional_network_gets_its_relus_back():
    model, batch = models.cnn()
    _, _, changed = programs(model, (), batch)
    assert overwritten(changed) == {"relu", "relu_1", "relu_2"}


@pytest.mark.parametrize("rng, over", [("exact", {"relu", "add"}), ("fast", {"add"})])
def test_what_was_made_before_a_compilers_graph_ended_is_not_overwritten_after(rng, over):
    """Torch's own dropout is run by itself, and a compiled piece keeps what it likes."""

    class Dropping(Call):
        def forward(self, x):
            before = x @ self.weight
            dropped = nn.functional.dropout(x * 2.0, 0.5)
            return before.relu().sum() + (dropped @ self.weight + 1.0).sum()

    captured = capture_call(Dropping(None), (X,), numerics=Numerics(rng=rng))
    graph = captured.graph
    program = lower(graph, analyze(graph), everything_whole(graph), 0)
    changed = in_place(program, graph)
    verify(changed)
    whole = {op.name for op in graph.ops if graph.tensor[op.name].shape}
    assert overwritten(changed) & whole == over


OPERATORS = (
    lambda a, b: a.relu(),
    lambda a, b: a.tanh(),
    lambda a, b: a.sigmoid(),
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a * 0.5,
    lambda a, b: a - 0.25,
    lambda a, b: a @ b,
    lambda a, b: a.t(),
    lambda a, b: a.reshape(2, 8).reshape(4, 4),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.masked_fill(b > 0.1, 0.5),
    lambda a, b: a.clamp(-0.7, 0.7),
    lambda a, b: a.exp().neg(),
    lambda a, b: a.clone(),
    lambda a, b: a.detach() + b,
)


class Random(nn.Module):
    """Twenty operators, each of two earlier values, the later ones likelier."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))

    def forward(self, x):
        draw = random.Random(self.seed)
        values = [x, self.weight, x @ self.weight]
        for _ in range(20):
            a, b = (values[-min(len(values), 1 + int(draw.expovariate(0.5)))] for _ in "ab")
            values.append(draw.choice(OPERATORS)(a, b))
        other = values[draw.randrange(3, len(values))]
        return values[-1].sum() + other.square().sum() + self.weight.sum()


@pytest.mark.parametrize("seeds", [range(0, 12), range(12, 24)])
def test_random_programs_give_the_same_numbers(seeds):
    count = 0
    for seed in seeds:
        model = Random(seed)
        captured, program, changed = programs(model, (X,))
        assert same_numbers(model, captured, program, changed, (X,)), seed
        count += len(overwritten(changed))
    assert count > 2 * len(seeds), "few operators wrote over their operand"


def same_numbers(model, captured, program, changed, args):
    """Whether both programs give exactly the outputs and gradients of the module, twice."""
    runs = [outputs_and_gradients(model, model, args)]
    for one in (program, changed):
        module = to_module(one, torch.device("cpu"), lambda instruction: pytest.fail())
        leaves = [_leaf(model, leaf, args) for leaf in captured.graph.leaves]
        for _ in range(2):
            runs.append(outputs_and_gradients(model, module, (*leaves, torch.zeros(2))))
    count = len(captured.graph.outputs)
    outputs = [run[0][:count] for run in runs]
    return all(
        torch.equal(a, b)
        for out, run in zip(outputs[1:], runs[1:], strict=True)
        for a, b in zip((*outputs[0], runs[0][1]), (*out, run[1]), strict=True)
    )


def _leaf(model, leaf, args):
    if leaf.kind is LeafKind.PARAMETER:
        return model.get_parameter(leaf.keys[0])
    if leaf.kind is LeafKind.BUFFER:
        return model.get_buffer(leaf.keys[0]).clone()
    return args[int(leaf.keys[0].removeprefix("args."))].clone()


def outputs_and_gradients(model, call, args):
    returned = call(*args)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    model.weight.grad = None
    sum(out.sum() for out in outputs if out.requires_grad).backward()
    return [out.detach().clone() for out in outputs], model.weight.grad.clone()
