"""Constraints and what-if settings with the real capture and search behind them."""

from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.report.text.explain import explain
from shardwright.train.targets.target import build_model, load_job

TARGET = f"{Path(__file__).parents[3] / 'examples' / 'mlp.py'}:job"
PIN = "hidden=tp:n"


def test_the_command_and_the_function_make_the_same_constrained_plan(as_json, tmp_path):
    file = tmp_path / "plan.json"
    options = ("--machine", "4xH100", "--pin", PIN, "--mesh", "dp=2,tp=2", "--set", "hidden=48")
    found = as_json("plan", TARGET, *options, "-o", file)
    plan = sw.Plan.load(file)
    (hidden,) = (op for op in plan.ops if op.source.module == "hidden")
    assert found["mesh"] == "dp=2 tp=2"
    assert hidden.tiling[1] == "n"
    assert "made under the constraints: pin hidden=tp:n; mesh dp=2 tp=2" in explain(plan)

    job = load_job(TARGET, settings=("hidden=48",))
    args, kwargs = job.call()
    made = sw.plan(
        build_model(job, meta=True),
        args,
        kwargs,
        machine=sw.Machine.preset("4xH100"),
        optimizer="sgd_momentum",
        constraints=[f"pin {PIN}", "mesh dp=2 tp=2"],
    )
    plan = replace(plan, rivals=(), chosen_precision="")
    assert made == plan, "a file also says what the plan was chosen from, and who chose bf16"


@pytest.mark.parametrize(
    "options, message",
    [
        (("--pin", "hiden=tp:n"), "pin hiden=tp:n: no module matches 'hiden'; there are hidden"),
        (("--pin", "hidden=tp:heads"), "nothing in hidden can do 'heads'; the words there are"),
        (
            # six samples over four devices: 2, 2, 2 and none
            ("--pin", "hidden=dp:batch", "--mesh", "dp=4", "--set", "batch=6"),
            "no plan on 4 devices meets the constraints: pin hidden=dp:batch: on mesh dp=4 linear"
            " of hidden would leave a device without a part; its sizes are batch 6, features (sum)"
            " 16, features 64",
        ),
    ],
)
def test_what_cannot_be_is_one_line(mistake, options, message):
    assert message in mistake("plan", TARGET, "--machine", "4xH100", *options)


def test_another_machine_is_one_more_what_if(as_json):
    command = ("frontier", TARGET, "--machine", "4xH100", "--devices", "2")
    asked = as_json(*command, "--set", "machine=2xcpu", "--set", "hidden=48")
    plain = as_json("frontier", TARGET, "--machine", "2xcpu", "--set", "hidden=48")
    assert [point["step_seconds"] for point in asked["points"]] == [
        point["step_seconds"] for point in plain["points"]
    ]
    assert asked["points"] != as_json(*command, "--set", "hidden=48")["points"]


def test_the_machine_may_be_named_by_set_alone(as_json, tmp_path):
    found = as_json("plan", TARGET, "--set", "machine=2xcpu", "-o", tmp_path / "plan.json")
    assert found["devices"] == 2


def test_no_machine_is_a_mistake(mistake):
    assert "Missing option '--machine'" in mistake("plan", TARGET, "--set", "machine=")
