import pytest

from shardwright.plan_io.files import load_plan, save_plan
from shardwright.report.text.explain import explain
from tests.harness import plans


def test_explain_prints_the_plan_in_words(tmp_path, shardwright_command):
    file = tmp_path / "plan.json"
    save_plan(plans.transformer(), file)
    result = shardwright_command("explain", file)
    assert result.exit_code == 0, result.exception
    assert result.stdout == explain(load_plan(file)) + "\n"


def test_explain_json_holds_costs_and_text(plan_file, as_json):
    found = as_json("explain", plan_file)
    assert found["step_seconds"] == 0.1
    assert found["summary"] == "DDP 2: dp=2 splits batch; parameters replicated"
    assert found["headline"] == "DDP 2"
    (axis,) = found["axes"]
    assert (axis["axis"], axis["role"], axis["size"]) == ("dp", "data (replicas)", 2)
    assert (axis["link"], axis["splits"]) == ("host", "batch") and axis["bytes"] > 0
    assert found["text"] == explain(load_plan(plan_file))


def test_explain_json_names_operators_without_a_written_rule(tmp_path, as_json):
    save_plan(plans.transformer(), tmp_path / "plan.json")
    remarks = as_json("explain", tmp_path / "plan.json")["remarks"]
    assert [(r["kind"], r["what"], r["count"]) for r in remarks] == [
        ("discovered", "foo.bar.default", 1),
        ("replicated", "foo.baz.default", 2),
        ("explicit", "attention with dropout", 1),
    ]
    assert remarks[0]["seconds"] == pytest.approx(0.1e-3)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is not JSON"),
        ('{"format": 1', "it is corrupt or cut short, plan again"),
        ("[]", "has no format number; give a file that `plan` wrote"),
        ('{"format": 999}', "has format 999, this version reads up to"),
        ('{"format": 1}', "lacks the field 'mesh'; it is damaged, plan again"),
    ],
)
def test_a_broken_plan_file_is_a_mistake(tmp_path, mistake, text, message):
    file = tmp_path / "plan.json"
    file.write_text(text)
    line = mistake("explain", file)
    assert message in line
    assert str(file) in line


def test_a_missing_plan_file_is_a_mistake(mistake):
    assert "cannot read plan nowhere.json" in mistake("explain", "nowhere.json")
