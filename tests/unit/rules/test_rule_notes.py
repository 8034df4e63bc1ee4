"""What a plan says of operators whose rule is not in the tables, and of those taken apart."""

import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import RemarkKind
from shardwright.plan_io.files import save_plan
from shardwright.report.text.explain import explain
from shardwright.report.text.notes import as_json
from shardwright.rules.analysis import analyze
from shardwright.rules.rule_notes import remarks
from tests.harness import models


class Odd(nn.Module):
    """One operator with a rule to be found, twice, and one without any."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = torch.special.i1e(torch.special.i1e(self.layer(x)))
        return torch.linalg.qr(y)[0].square().sum()


def _plan(model, batch, machine="2xcpu"):
    return sw.plan(model, (), batch, machine=sw.Machine.preset(machine))


def test_a_plan_names_discovered_and_replicated_operators_and_what_they_cost(tmp_path):
    save_plan(_plan(Odd(), {"x": torch.randn(8, 6)}), tmp_path / "plan.json")
    plan = sw.Plan.load(tmp_path / "plan.json")
    found = {remark["kind"]: remark for remark in as_json(plan)}
    assert set(found) == {"discovered", "replicated"}
    assert found["discovered"]["what"] == "aten.special_i1e.default"
    assert found["discovered"]["text"] == "f1 f0 -> f1 f0"
    assert (found["discovered"]["count"], found["replicated"]["count"]) == (2, 1)
    assert "experiments found no split" in found["replicated"]["text"]
    for remark in plan.remarks:
        own = [op for op in plan.ops if op.target == remark.what]
        assert {op.name for op in own} == set(remark.ops)
        seconds = sum(op.seconds for op in own)
        assert found[remark.kind.value]["seconds"] == seconds > 0
        share = f"{seconds * 1e3:.2f} ms, {seconds / plan.step_seconds:.1%} of the step"
        assert f"{remark.count} x {remark.what}, {share}" in explain(plan)


def test_a_stated_rule_is_told_from_a_discovered_one(monkeypatch):
    monkeypatch.setattr("shardwright.rules.user_rules._USER_RULES", {})
    sw.rule("aten::special_i1e", "... -> ...")
    graph = sw.capture(Odd(), (torch.randn(8, 6),))
    kinds = [remark.kind for remark in remarks(graph, analyze(graph))]
    assert kinds == [RemarkKind.STATED, RemarkKind.REPLICATED]


class Whole(nn.Module):
    """Operators that cannot be split, and a sum of a number, which has nothing to split."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        y = self.layer(x).flatten()
        ordered = y.sort()[0].cumsum(0)
        place = torch.zeros(y.shape, dtype=torch.long)
        written = y.scatter_add(0, place, y)
        return (ordered + written).median() + y.argmax() + y.sum().sum()


def test_an_operator_that_every_device_computes_says_why():
    graph = sw.capture(Whole(), (torch.randn(8, 6),))
    found = {remark.what.split(".")[1]: remark for remark in remarks(graph, analyze(graph))}
    assert {kind: remark.text for kind, remark in found.items()} == {
        "sort": "it works along every dimension",
        "cumsum": "it works along every dimension",
        "scatter_add": "two of its writes may hit the same place",
        "median": "no rule is written, and experiments found no split that gives its results",
        "argmax": "it reduces every dimension, and is no sum",
    }
    assert {remark.kind for remark in found.values()} == {RemarkKind.REPLICATED}


def test_attention_with_dropout_says_what_its_formula_costs():
    """Also where the search works on a shortened graph: all seven layers are counted."""
    plan = _plan(*models.gpt2(layers=7, dropout=0.1))
    (remark,) = plan.remarks
    assert (remark.kind, remark.count) == (RemarkKind.EXPLICIT, 7)
    by_name = {op.name: op for op in plan.ops}
    kinds = [by_name[name].target.split(".")[1] for name in remark.ops]
    assert kinds.count("matmul") == 14 and kinds.count("dropout") == kinds.count("softmax") == 7
    assert "attention with dropout" in explain(plan) and "rng='fast'" in explain(plan)
    assert not _plan(*models.gpt2(dropout=0.0)).remarks


def test_what_was_unusual_about_the_capture_is_in_the_plan():
    class Numpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(x)
            return (y * torch.from_numpy(y.detach().numpy())).sum()

    plan = _plan(Numpy(), {"x": torch.randn(8, 6)})
    assert any(note.startswith("captured in strict mode, since") for note in plan.notes)
    assert "captured in strict mode" in explain(plan)
