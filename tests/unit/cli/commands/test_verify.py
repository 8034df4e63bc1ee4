import json
from dataclasses import replace

import pytest

from shardwright.ir.plan import InputSpec
from shardwright.plan_io.files import save_plan
from tests.harness import plans
from tests.unit.cli.conftest import GRAPH


def test_verify_says_that_the_plan_is_equal(api, target, plan_file, shardwright_command):
    result = shardwright_command("verify", target, plan_file)
    assert result.exit_code == 0, result.exception
    assert result.stdout == "the plan equals one device\n"


def test_verify_json_holds_the_contracts_keys(api, target, plan_file, as_json):
    assert as_json("verify", target, plan_file) == {
        "ok": True,
        "loss_error": 1e-7,
        "max_gradient_error": 2e-7,
        "max_buffer_error": 4e-7,
        "max_parameter_error": 3e-7,
        "worst": "weight",
        "capture_error": 5e-7,
        "compared_in": "float64",
        "not_compared": "",
        "notes": [],
    }


def test_json_of_a_module_that_was_not_compared_has_no_error(
    api, target, plan_file, shardwright_command
):
    api.report = replace(
        api.report, ok=False, capture_error=float("inf"), not_compared="TypeError: no"
    )
    found = json.loads(shardwright_command("verify", target, plan_file, "--json").stdout)
    assert (found["ok"], found["capture_error"], found["not_compared"]) == (
        False,
        None,
        "TypeError: no",
    )


def test_a_plan_that_is_not_equal_exits_with_one(api, target, plan_file, shardwright_command):
    api.report = replace(api.report, ok=False, loss_error=0.5)
    result = shardwright_command("verify", target, plan_file)
    assert result.exit_code == 1
    assert result.stdout == "the plan DIFFERS from one device\n"
    result = shardwright_command("verify", target, plan_file, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"inputs": (InputSpec("args.0", (16, 4), "float32"),)},
            "is a plan for args.0 float32[16, 4], the target gives float32[8, 4]; change the batch",
        ),
        (
            {"inputs": (InputSpec("kwargs.x", (8, 4), "float32"),)},
            "is a plan for another model: that takes kwargs.x, the target's takes args.0; plan",
        ),
        (
            {"fingerprint": "0123456789abcdef"},
            "is a plan for another model: its graph is 0123456789abcdef, that of the target",
        ),
    ],
)
def test_a_plan_for_something_else_is_a_mistake(api, target, tmp_path, mistake, changes, message):
    file = tmp_path / "plan.json"
    save_plan(replace(plans.simple(), **{"fingerprint": GRAPH.fingerprint, **changes}), file)
    assert message in mistake("verify", target, file)
