"""An unmodified module and one call become the serial graph."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import LeafKind, verify
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from shardwright.tracing.graph_builder import require_states
from tests.harness import models


def captured(model, *args, **kwargs):
    return capture_call(model, args, kwargs).graph


def line_of(function, text):
    """The number of the line of this file that holds `text` in a function's body."""
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if text in line)
    return first + offset


EXAMPLES = {
    "gpt2": models.gpt2,
    "gpt2 without dropout": lambda: models.gpt2(dropout=0.0),
    "llama": models.llama,
    "cnn": models.cnn,
    "mlp": models.mlp,
    "traps": models.traps,
    "no loss": models.no_loss,
}
CASES = [
    pytest.param(name, marks=pytest.mark.hf if name.startswith(("gpt2", "llama")) else ())
    for name in EXAMPLES
]


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_the_same_on_meta_and_on_cpu_and_the_model_is_left_alone(name):
    model, batch = EXAMPLES[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    graph = captured(model, **batch)
    verify(graph)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert captured(model, **batch).fingerprint == graph.fingerprint
    with torch.device("meta"):
        model, batch = EXAMPLES[name]()
    assert all(p.is_meta for p in model.parameters())
    assert str(captured(model, **batch)) == str(graph)
    assert captured(model, **batch).fingerprint == graph.fingerprint


class Detached(nn.Module):
    """What is detached is lost where nothing is differentiated."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.norm(self.layer(x))
        with torch.no_grad():
            scale = y.square().mean()
        return (y / scale).sum() + y.detach().sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_is_captured_where_the_caller_wants_no_gradients(mode):
    model, x = Detached(), torch.randn(3, 4)
    with mode():
        found = captured(model, x)
    assert str(found) == str(captured(model, x))
    assert sum(op.target == "aten.detach.default" for op in found.ops) >= 2


def test_other_shapes_modes_and_constants_are_other_graphs():
    model, batch = models.cnn()
    graphs = [
        captured(model, **batch),
        captured(model, **models.cnn(batch=4)[1]),
        captured(model.eval(), **batch),
        captured(models.cnn(channels=(7, 8))[0], **batch),
        captured(models.cnn(norm=True)[0], **batch),
    ]
    assert len({graph.fingerprint for graph in graphs}) == len(graphs)


@pytest.mark.hf
def test_tied_weights_are_one_leaf_with_both_names():
    model, batch = models.gpt2()
    graph = captured(model, **batch)
    parameters = graph.leaves_of(LeafKind.PARAMETER)
    assert len(parameters) == len(list(model.parameters()))
    (tied,) = (leaf for leaf in parameters if len(leaf.keys) > 1)
    assert tied.keys == ("transformer.wte.weight", "lm_head.weight")
    assert [op.kind for op in graph.consumers[tied.name]] == ["embedding", "linear"]


def test_leaves_are_named_as_the_user_names_them():
    model, batch = models.traps()
    graph = captured(model, **batch)
    kinds = {leaf.name: leaf.kind for leaf in graph.leaves}
    assert kinds["mix.weight"] is LeafKind.PARAMETER
    assert kinds["kwargs.padding"] is LeafKind.INPUT
    assert graph.tensor["mix.weight"].requires_grad
    assert not graph.tensor["scale"].requires_grad, "it is frozen"
    assert "unused" in kinds, "a parameter that nothing reads is still the model's"
    assert graph.consumers["unused"] == ()


def test_a_buffer_that_the_model_changes_is_an_update():
    model, batch = models.mlp()
    graph = captured(model, **batch)
    ((buffer, value),) = graph.updates
    assert buffer == "running"
    assert graph.tensor[value].shape == model.running.shape
    assert not graph.tensor[value].requires_grad


def test_operators_know_the_module_and_the_line_that_they_come_from():
    model, batch = models.mlp()
    graph = captured(model, **batch)
    ((tanh,), (linear, _)) = (
        [op for op in graph.ops if op.kind == kind] for kind in ("tanh", "linear")
    )
    assert linear.source.module == "up"
    assert tanh.source.module == ""
    assert tanh.source.file.endswith("models.py")
    assert tanh.source.line == line_of(models.MLP.forward, "torch.tanh")


def test_dropouts_are_operators_of_ours_numbered_in_order():
    model, batch = models.cnn()
    drops = [op for op in captured(model, **batch).ops if op.kind == "dropout"]
    assert [op.target for op in drops] == ["shardwright.dropout.default"] * 2
    assert [op.args[1:] for op in drops] == [(0.5, 0), (0.5, 1)]
    assert not [op for op in captured(model.eval(), **batch).ops if op.kind == "dropout"]


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fixed = torch.arange(3.0)

    def forward(self, x, pair, flag=False):
        x.cos()  # nobody reads it
        y = self.layer(x) * pair[0] + pair[1]
        y = y + torch.tensor([1.0, 2.0, 3.0, 4.0])
        if flag:
            y = y[:3] * self.fixed.unsqueeze(1)
        return y


def test_constants_of_the_call_and_of_the_code_are_kept():
    x = torch.ones(5, 4)
    one = capture_call(Odd(), (x, (torch.tensor(2.0), 3)), {"flag": True})
    graph = one.graph
    assert dict(graph.constants) == {"args.1.1": 3, "kwargs.flag": True}
    assert {leaf.keys[0] for leaf in graph.leaves_of(LeafKind.INPUT)} == {"args.0", "args.1.0"}
    constants = graph.leaves_of(LeafKind.CONSTANT)
    assert {leaf.name for leaf in constants} == set(one.constants)
    values = sorted(value.tolist() for value in one.constants.values())
    assert values == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]]
    assert "cos" not in {op.kind for op in graph.ops}, "dead code goes"


def test_the_same_tensor_for_two_arguments_is_two_inputs():
    class Two(nn.Module):
        def forward(self, a, b):
            return (a * b).sum()

    x = torch.ones(3)
    leaves = captured(Two(), x, x).leaves
    assert [leaf.name for leaf in leaves] == ["args.0", "args.1"]


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x


class TakesANumber(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class Breaks(nn.Module):
    def forward(self, x):
        return F.linear(x, torch.ones(2, 9))


class ChangesItsInput(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return x.sum()


class ReturnsText(nn.Module):
    def forward(self, x):
        return "x"


@pytest.mark.parametrize(
    "model, text",
    [(Branches, "x.sum() > 0"), (Breaks, "F.linear")],
)
def test_a_model_that_cannot_be_captured_is_told_the_line(model, text):
    with pytest.raises(CaptureError) as error:
        captured(model(), torch.ones(3, 4))
    assert f"{__file__}:{line_of(model.forward, text)}" in str(error.value)
    assert str(error.value).startswith(f"{model.__name__} cannot be captured: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "model, message",
    [
        (Branches, r"decides on the value of a tensor .*express it with torch\.where"),
        (TakesANumber, r"takes a number out of a tensor.*; keep it a tensor, without \.item\(\)"),
        (ChangesItsInput, r"the model changes .* in place.*; work on a copy \(x = x\.clone\(\)\)"),
        (ReturnsText, "the model returned a str; return a tensor"),
    ],
)
def test_what_no_fixed_graph_can_express_is_refused(model, message):
    with pytest.raises(CaptureError) as error:
        captured(model(), torch.ones(3, 4))
    assert re.search(message, str(error.value))


def test_an_argument_of_an_unknown_type_is_refused_by_its_name():
    with pytest.raises(CaptureError, match=r"argument kwargs\.pair is a slice"):
        captured(Odd(), torch.ones(5, 4), pair=slice(3))


@pytest.mark.parametrize(
    "args, kwargs, says",
    [
        ((), {}, "missing 1 required positional argument"),
        ((torch.ones(3, 4),), {"labels": torch.ones(3)}, "got an unexpected keyword argument"),
    ],
)
def test_a_call_that_does_not_fit_the_model_is_told_without_a_line(args, kwargs, says):
    """It was "Branches cannot be captured: an unknown line: TypeError: ..."."""
    with pytest.raises(CaptureError, match=f"the call does not fit Branches: .*{says}"):
        captured(Branches(), *args, **kwargs)


def test_states_of_a_wrong_shape_that_export_gives_are_refused():
    """`torch.export` of torch 2.11 gives (layers, 1, batch, hidden) on CPUs."""
    graph = torch.fx.Graph()
    x, state = graph.placeholder("x"), graph.placeholder("state")
    x.meta["val"], state.meta["val"] = torch.empty(6, 5, 3), torch.empty(2, 5, 4)
    node = graph.call_function(torch.ops.aten.lstm.input, (x, [state, state]))
    right = torch.empty(6, 5, 4), torch.empty(2, 5, 4), torch.empty(2, 5, 4)
    require_states(node, right)
    with pytest.raises(CaptureError, match="the states of an LSTM a wrong shape; take a newer"):
        require_states(node, (right[0], torch.empty(2, 1, 5, 4), right[2]))
