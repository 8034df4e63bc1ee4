"""The probe finds graphs whose gradients are not the module's, and runs only where asked."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.tracing import capture as entry
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from shardwright.tracing.export.export import FlatCall
from shardwright.tracing.gradients.gradient_probe import Suspicion, probe, suspect, suspicions

X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DOUBT = (Suspicion("a trick", "net.py:7"),)


def call_of(model):
    return FlatCall(model, {"args.0": X}, {})


class Net(nn.Module):
    def __init__(self, doubts=False):
        super().__init__()
        self.doubts = doubts
        self.first, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        if self.doubts:
            suspect("a trick")
        return self.drop(self.last(self.first(x))).square().sum()


def test_a_true_graph_passes_and_nothing_is_left_behind():
    torch.manual_seed(0)
    model = Net().double()
    captured = capture_call(model, (X,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    probe(call_of(model), {"args.0": X}, captured, DOUBT)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_false_graph_is_refused_in_one_line_that_names_the_suspicion():
    torch.manual_seed(0)
    model = Net().double()
    captured = capture_call(model, (X,))
    ops = tuple(
        replace(op, target="aten.abs.default", args=op.args[:1]) if op.kind == "square" else op
        for op in captured.graph.ops
    )
    assert ops != captured.graph.ops
    false = replace(captured, graph=replace(captured.graph, ops=ops))
    with pytest.raises(
        CaptureError, match=r"^a trick in net\.py:7: .* gives \S+ another gradient"
    ) as e:
        probe(call_of(model), {"args.0": X}, false, DOUBT)
    assert "\n" not in str(e.value)
    probe(call_of(model), {"args.0": X}, false, ())  # nobody suspects it


def test_on_the_meta_device_a_parameter_without_a_way_for_its_gradient_is_refused():
    class Cut(Net):
        def forward(self, x):
            return (self.first(x).detach() * self.last.weight).sum()

    with torch.device("meta"):
        model = Cut()
    captured = capture_call(model, (torch.empty(4, 3, device="meta"),))
    with pytest.raises(CaptureError, match=r"no gradient reaches first\.weight"):
        probe(call_of(model), {"args.0": X.to("meta")}, captured, DOUBT)


def test_it_runs_only_where_something_is_suspect(monkeypatch):
    seen = []
    monkeypatch.setattr(entry, "probe", lambda *args: seen.append(args[-1]))
    capture_call(Net(), (X.float(),))
    capture_call(Net(doubts=True), (X.float(),))
    assert seen[0] == []
    (found,) = seen[1]
    assert found.what == "a trick" and found.where.partition(":")[0].endswith(
        "test_gradient_probe.py"
    )


def test_a_suspicion_is_noted_once_and_only_within_a_capture():
    suspect("outside")
    with suspicions() as found:
        for _ in range(2):
            suspect("a hook", "net.py:3")
    assert [str(one) for one in found] == ["a hook in net.py:3"]
