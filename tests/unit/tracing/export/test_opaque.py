"""Sub-modules that export cannot follow are kept whole, and a graph says which and why."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.plan_io.files import save_plan
from shardwright.report.text.explain import explain
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from shardwright.tracing.export.opaque import WeightsNeededError
from shardwright.tracing.trees import join_tensors, split_tensors
from tests.zoo.subject import Subject, worst


class Branch(nn.Module):
    """Decides on its input, counts its calls, and answers with more than a tensor."""

    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1.0):
        self.calls += 1
        if x.sum() > 0:
            return {"y": self.up(x) * scale, "note": "up"}
        return {"y": self.down(x).relu() * scale, "note": "down"}


class Selects(nn.Module):
    """As many elements as the data say, in between."""

    def forward(self, x):
        return x * x[x > 0].sum()


class Grows(nn.Module):
    """As many rows as the data say: no fixed graph can have it."""

    def forward(self, x):
        return x[: 2 if x.sum() > 0 else 3]


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            x = x + (y["y"] if isinstance(y, dict) else y)
        return self.last(x).square().mean()


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def test_a_block_that_branches_is_one_operator_and_everything_else_is_captured():
    model = Net(Branch(), nn.Linear(4, 4))
    graph = capture_call(model, (X,)).graph
    (op,) = (op for op in graph.ops if op.kind == "opaque")
    assert op.args[1:] == ("blocks.0", "Branch")
    assert op.source.module == "blocks.0"
    names = ["blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.down.weight"]
    assert list(op.operands[:3]) == names and op.operands[4] == "blocks.0.calls"
    assert [op.kind for op in graph.ops].count("linear") == 3
    assert [buffer for buffer, _ in graph.updates] == ["blocks.0.calls"]
    assert "forward" not in model.blocks[0].__dict__ and model.blocks[0].calls == 0
    assert graph.note.startswith("blocks.0 (Branch) kept whole and computed by every device, since")
    assert "test_opaque.py:27 decides on the value of a tensor" in graph.note


@pytest.mark.parametrize("sign", [1, -1])
def test_it_trains_as_the_module_does(sign):
    torch.manual_seed(0)
    model = Net(Branch(), Selects())
    batch = {"x": sign * X.abs()}
    one = Subject(model, batch)
    assert [op.kind for op in one.graph.ops].count("opaque") == 2
    found = one.run(one.one_device())
    loss = model(**one.batch)
    loss.backward()
    expected = {"loss": loss.detach(), "buffer blocks.0.calls": model.blocks[0].calls}
    expected |= {f"gradient of {key}": p.grad for key, p in model.named_parameters()}
    assert worst(expected, {key: found[key] for key in expected})[0] < 1e-14


def test_many_blocks_of_a_kind_are_found_in_two_attempts(monkeypatch):
    attempts = []
    export = capture_call.__globals__["export"]
    monkeypatch.setitem(
        capture_call.__globals__, "export", lambda *a: attempts.append(1) or export(*a)
    )
    graph = capture_call(Net(*(Branch() for _ in range(5))), (X,)).graph
    assert [op.kind for op in graph.ops].count("opaque") == 5
    assert len(attempts) == 4  # one of them follows the values of x
    assert graph.note.count("kept whole") == 1, "one reason, said once"


def test_a_plan_says_what_is_kept_whole_and_why(tmp_path):
    plan = sw.plan(Net(Branch(), Branch()), (X,), machine=sw.Machine.preset("2xcpu"))
    save_plan(plan, tmp_path / "plan.json")
    text = " ".join(explain(sw.Plan.load(tmp_path / "plan.json")).split())
    assert "opaque 2 x Branch, " in text
    assert "kept whole, so every device computes all of it (blocks.0, blocks.1)" in text
    assert "decides on the value of a tensor" in text


def test_what_it_takes_is_counted_when_it_is_run():
    model, x = Net(Branch(256)), X
    model.first, model.last = nn.Linear(3, 256), nn.Linear(256, 2)
    graph = capture_call(model, (x,)).graph
    (op,) = (op for op in graph.ops if op.kind == "opaque")
    assert op.flop == 3 * 2 * 5 * 256 * 256, "one of two layers, forward and backward"
    machine = sw.Machine.preset("2xcpu")
    plan = sw.search(graph, machine)[0]
    seconds = {planned.name: planned.seconds for planned in plan.ops}[op.name]
    peak = machine.device.peak_flop_per_s("float32") * machine.device.efficiency.matmul
    assert seconds >= op.flop / peak


def test_a_model_on_the_meta_device_says_that_it_needs_weights():
    with torch.device("meta"):
        model = Net(Branch())
    with pytest.raises(WeightsNeededError) as wrong:
        capture_call(model, (X,))
    assert "test_opaque.py:27 decides on the value of a tensor" in str(wrong.value)
    assert "blocks.0 could be kept whole instead, but it is on the meta device" in str(wrong.value)
    assert "build the model with weights" in str(wrong.value)


def test_where_the_model_itself_would_be_kept_whole_the_error_stays():
    with pytest.raises(CaptureError, match=r"Branch cannot be captured: .*test_opaque\.py:27 dec"):
        capture_call(Branch(3), (X,))
    with pytest.raises(CaptureError, match=r"decides on the value.*fails too: blocks\.0 returns"):
        capture_call(Net(Grows()), (X,))


def test_a_plain_mistake_is_told_first():
    """It fails whoever runs it; nothing is gained by keeping the layer whole."""
    model = Net(nn.Linear(5, 4))
    with pytest.raises(CaptureError, match=r"^Net cannot be captured: .*test_opaque\.py:\d+: Run"):
        capture_call(model, (X,))


def test_a_module_that_draws_is_seeded_alike_on_every_rank():
    class Draws(nn.Module):
        def forward(self, x):
            return x * torch.multinomial(x.abs() + 1, 1)

    one = Subject(Net(Draws()), {"x": X})
    losses = [one.run(one.one_device())["loss"] for _ in range(2)]
    assert losses[0] == losses[1]


def test_what_is_around_tensors_stays():

    value = ([torch.ones(1), 2], {"a": None, "b": (torch.zeros(2), "text")})
    around, tensors = split_tensors(value)
    assert [t.numel() for t in tensors] == [1, 2]
    back = join_tensors(around, [t + 1 for t in tensors])
    assert back[0][0] == 2 and back[0][1] == 2 and back[1]["b"][1] == "text"
    assert (back[1]["b"][0] == 1).all()
