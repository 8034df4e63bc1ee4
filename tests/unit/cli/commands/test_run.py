import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from shardwright.cli.commands import run
from shardwright.plan_io.files import load_plan, save_plan
from shardwright.train import launch
from shardwright.train.launch import Training
from shardwright.train.launch_options import LaunchOptions, SaveOptions
from shardwright.train.loop import StepRecord
from shardwright.train.routing import RoutingRecord
from shardwright.train.targets.target_text import Target
from tests.harness import plans
from tests.unit.cli.conftest import GRAPH

RECORDS = tuple(
    StepRecord(i, 2.0 / i, 0.04, 8, "samples", 2**20, tensor_bytes=50 * 2**20 * (i == 2))
    for i in range(1, 6)
)


@pytest.fixture
def launched(monkeypatch):
    """What `run` asked to launch; its `training` is what comes back."""

    class Launched:
        def __init__(self):
            self.training = Training(0, RECORDS)
            self.calls = []

        def __call__(self, target, plan, options, *, stdout):
            self.calls.append((target, plan, options, stdout))
            return self.training

        @property
        def options(self):
            return self.calls[-1][2]

    fake = Launched()
    monkeypatch.setattr(launch, "launch", fake)
    return fake


def test_run_plans_trains_verifies_and_compares(api, target, launched, shardwright_command):
    result = shardwright_command("run", target, "--devices", 2, "--machine", "2xcpu")
    assert result.exit_code == 0, result.exception
    order = [
        "fits with ",
        "DDP 2 · no pipeline",
        "speed  ",
        "others that fit",
        f"training {target} on 2 ranks",
        "loss 2.0000 at step 1, 0.4000 at step 5",
        "step time: predicted 80.0 ms, measured 40.0 ms (median), predicted / measured 2.00",
        "peak memory: predicted ",
        "the plan equals one device",
    ]
    places = [result.stdout.index(text) for text in order]
    assert places == sorted(places)
    ((asked, plan, options, _),) = launched.calls
    assert (asked, plan.devices, options) == (Target(target, cached=False), 2, LaunchOptions())
    part = plan.peak_bytes / (50 * 2**20)
    assert f"measured 50.0 MiB of tensors, predicted / measured {part:.2f}" in result.stdout


def test_run_ends_with_the_routing_that_was_measured(
    api, target, tmp_path, launched, as_json, shardwright_command
):
    file = tmp_path / "apart.json"
    assert shardwright_command("plan", target, "--machine", "2xcpu", "-o", file).exit_code == 0
    save_plan(replace(load_plan(file), expert_skew=1.25), file)
    launched.training = Training(0, RECORDS, routing=RoutingRecord(1.3125, 1.75))
    result = shardwright_command("run", target, file, "--no-verify")
    assert result.stdout.splitlines()[-1] == (
        "rows of experts, busiest device over the mean: stated 1.25, measured 1.31 (mean), 1.75"
        " (most)"
    )
    found = as_json("run", target, file, "--no-verify")
    assert found["expert_skew"] == {"stated": 1.25, "measured": 1.3125, "most": 1.75}


def test_run_takes_a_plan_and_a_number_of_steps(
    api, target, plan_file, launched, shardwright_command
):
    result = shardwright_command("run", target, plan_file, "--steps", 9, "--no-verify")
    assert result.exit_code == 0, result.exception
    assert "equals" not in result.stdout
    assert api.searched == []
    assert launched.options.steps == 9


def test_a_plan_runs_with_the_habits_it_was_made_with(
    api, target, tmp_path, launched, mistake, shardwright_command
):
    file = tmp_path / "fast.json"
    planned = shardwright_command("plan", target, "--machine", "2xcpu", "--rng", "fast", "-o", file)
    assert planned.exit_code == 0, planned.exception
    result = shardwright_command("run", target, file, "--no-verify")
    assert result.exit_code == 0, result.exception
    assert launched.calls[0][1].numerics.rng == "fast"
    assert mistake("run", target, file, "--rng", "exact") == (
        f"shardwright: {file} is finished, '--rng exact' cannot change it; leave out the plan file"
        " to plan again"
    )


def test_run_json_holds_what_was_predicted_and_measured(api, target, plan_file, launched, as_json):
    found = as_json("run", target, plan_file)
    assert found["predicted_step_seconds"] == 0.1
    assert found["measured_step_seconds"] == 0.04
    assert found["losses"] == [record.loss for record in RECORDS]
    assert found["verify"]["ok"] is True
    assert launched.calls[0][3] is not None  # the ranks' log stays off stdout


def test_a_failed_training_keeps_its_status(api, target, plan_file, launched, shardwright_command):
    launched.training = Training(3, ())
    result = shardwright_command("run", target, plan_file)
    assert result.exit_code == 3
    assert "training ended with status 3" in result.stderr
    assert "equals" not in result.stdout


def test_a_run_that_was_done_says_so(api, target, plan_file, launched, shardwright_command):
    launched.training = Training(0, ())
    done = shardwright_command("run", target, plan_file, "--no-verify", "--checkpoint", "kept")
    assert done.exit_code == 0 and "no step was left to do" in done.stdout


def test_a_plan_that_verifies_unequal_exits_with_one(
    api, target, plan_file, launched, shardwright_command
):
    api.report = type(api.report)(ok=False)
    result = shardwright_command("run", target, plan_file, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verify"]["ok"] is False


def test_another_number_of_devices_is_a_mistake(api, target, plan_file, launched, mistake):
    line = mistake("run", target, plan_file, "--devices", 3)
    assert line == (
        f"shardwright: {plan_file} is a plan for 2 devices, --devices is 3; start it with"
        " --devices 2 or plan again"
    )
    assert launched.calls == []


def test_without_plan_and_devices_there_is_nothing_to_plan_for(api, target, launched, mistake):
    assert "give --devices, the number of ranks" in mistake("run", target, "--machine", "2xcpu")


def test_a_machine_with_fewer_devices_is_a_mistake(api, target, launched, mistake):
    line = mistake("run", target, "--devices", 4, "--machine", "2xcpu")
    assert "4 devices asked of 2xcpu, which has 2" in line


def test_constraints_shape_a_plan_that_is_made_and_none_that_is_there(
    api, target, plan_file, launched, as_json, mistake
):
    pin = ("--pin", "0=dp:batch")
    as_json("run", target, "--devices", 2, "--machine", "2xcpu", *pin)
    assert list(map(str, api.asked[0].constraints)) == ["pin 0=dp:batch"]
    line = mistake("run", target, plan_file, *pin)
    assert "is finished, 'pin 0=dp:batch' cannot change it; leave out the plan file" in line


def test_checkpoints_are_kept_where_the_command_says(api, target, plan_file, launched, as_json):
    as_json("run", target, plan_file)
    assert (launched.options.saving, launched.options.max_restarts) == (None, 0)
    saving = ("--checkpoint", "runs", "--every", 5, "--keep", 2, "--max-restarts", 4)
    as_json("run", target, plan_file, *saving)
    assert launched.options.saving == SaveOptions("runs", 5, 2)
    assert launched.options.max_restarts == 4


def test_a_run_that_starts_again_searches_only_for_devices_that_are_new(
    api, target, launched, tmp_path, shardwright_command
):
    def run(devices, *more):
        folder = ("--checkpoint", tmp_path / "runs", "--no-verify", *more)
        command = ("run", target, "--devices", devices, "--machine", "4xcpu", *folder)
        result = shardwright_command(*command)
        assert result.exit_code == 0, result.exception
        return result.stdout, len(api.searched)

    _, first = run(2)
    again, searched = run(2)
    assert first > 0 and searched == first
    assert f"{tmp_path / 'runs' / 'plans'}" in again
    _, fewer = run(1)
    assert fewer > first
    assert run(2)[1] == fewer  # both are known by now
    assert run(2, "--cap", "dp=2")[1] > fewer  # another wish is another search
    assert [plan.devices for _, plan, *_ in launched.calls] == [2, 2, 1, 2, 2]


def test_a_damaged_plan_is_searched_again(api, target, launched, tmp_path, shardwright_command):
    command = ("run", target, "--devices", 2, "--machine", "2xcpu", "--no-verify")
    command += ("--checkpoint", tmp_path)
    assert shardwright_command(*command).exit_code == 0
    (kept,) = (tmp_path / "plans").iterdir()
    whole = kept.read_text()
    kept.write_text(whole[:100])
    assert shardwright_command(*command).exit_code == 0
    assert kept.read_text() == whole


def test_restarts_without_a_checkpoint_would_begin_anew(api, target, plan_file, launched, mistake):
    line = mistake("run", target, plan_file, "--max-restarts", 1)
    assert line.endswith("give --checkpoint DIR")


def test_the_simulated_step_and_the_measured_one_are_two_processes_of_a_file(
    api, target, tmp_path, launched, as_json, shardwright_command, mistake
):
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    known = {"fingerprint": GRAPH.fingerprint, "inputs": plans.simple().inputs}
    save_plan(replace(plans.timed(plans.transformer()), **known), file)
    step = {"ph": "X", "name": "ProfilerStep#3", "ts": 90.0, "dur": 4e4, "pid": 1, "tid": 2}
    launched.training = Training(0, RECORDS, traces={0: json.dumps([step])})
    asked = ("run", target, file, "--no-verify", "--trace", trace)
    assert as_json(*asked)["trace"] == str(trace)
    assert launched.options.traced
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["simulated, each of 4 ranks", "measured, rank 0"]
    assert {e["pid"] for e in events if e["ph"] == "X"} == set(processes)

    launched.training = Training(0, RECORDS)
    trace.unlink()
    assert "no step was traced" in shardwright_command(*asked).stdout
    assert not trace.exists()
    launched.calls.clear()
    assert "step 3 of a run, and this one has 2" in mistake(*asked, "--steps", 2, "--json")
    gone = tmp_path / "gone" / "trace.json"
    line = mistake("run", target, file, "--trace", gone, "--json")
    assert "No such file or directory" in line
    assert launched.calls == []


def test_options_reach_the_ranks(api, target, plan_file, launched, tmp_path, as_json):
    weights, folder, export = (
        tmp_path / name for name in ("w.safetensors", "runs", "end.safetensors")
    )
    save_file({}, weights)
    asked = ("--weights", weights, "--export", export, "--stall-timeout", 5)
    asked += ("--compile", "--tune-host")
    asked += ("--start-timeout", 7)
    saving = ("--checkpoint", folder, "--wait-for-saves")
    as_json("run", target, plan_file, "--no-verify", *asked, *saving)
    assert launched.options == LaunchOptions(
        saving=SaveOptions(str(folder), wait=True),
        stall_timeout=5,
        start_timeout=7,
        weights=str(weights),
        export=str(export),
        compiled=True,
        tune_host=True,
    )


def test_a_run_in_bf16_is_planned_so(api, target, launched, as_json):
    asked = ("--devices", 2, "--machine", "2xcpu", "--precision", "bf16", "--no-verify")
    as_json("run", target, *asked)
    assert launched.calls[0][1].numerics.precision == "bf16"


def test_run_names_what_a_job_lacks_that_plans_do_not_need(
    api, target, launched, mistake, shardwright_command
):
    file = Path(target.rpartition(":")[0])
    job = "\n\ndef bare():\n    return replace(job(), optimizer=None, data=None, steps=None)\n"
    file.write_text(f"from dataclasses import replace\n{file.read_text()}{job}")
    bare = target.replace(":job", ":bare")
    assert shardwright_command("plan", bare, "--machine", "2xcpu").exit_code == 0
    line = mistake("run", bare, "--devices", 2, "--machine", "2xcpu", "--steps", 3)
    assert "no optimizer and no data, so it can be planned and not trained; give optimizer=" in line
    assert not launched.calls


def test_a_run_says_why_it_is_not_verified_and_can_be_asked_to_be(
    api, target, plan_file, launched, as_json, shardwright_command, monkeypatch
):
    monkeypatch.setattr(run, "reason_against", lambda *_: "takes about 300 GiB of this host's 24")
    text = " ".join(shardwright_command("run", target, plan_file).stdout.split())
    assert "not verified: a comparison with one device in float64 takes about 300 GiB" in text
    assert "equals" not in text
    found = as_json("run", target, plan_file)
    assert found["verify"] is None and found["not_verified"].endswith("of this host's 24")
    asked = as_json("run", target, plan_file, "--verify")
    assert asked["verify"]["ok"] and asked["not_verified"] is None
    left_out = as_json("run", target, plan_file, "--no-verify")
    assert left_out["verify"] is None and left_out["not_verified"] is None
