import json
from pathlib import Path

import pytest

from shardwright.plan_io.files import load_plan
from shardwright.tracing.export.opaque import WeightsNeededError


def test_plan_answers_in_a_few_lines(api, target, shardwright_command):
    result = shardwright_command("plan", target, "--machine", "2xcpu")
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 100
    assert lines[0].startswith("fits with 7.16 GiB to spare on 2 devices of 2xcpu: 80.0 ms a step")
    named = dict(line.split(maxsplit=1) for line in lines if line)
    assert named["speed"].startswith("100 samples/s, 50 per device")
    assert named["limited"].startswith("by  computing ")
    assert "100 ms  " in result.stdout  # another plan that fits
    assert "data parallel, the best of the baselines" not in result.stdout


def test_plan_prints_the_frontier_the_choice_and_why(api, target, tmp_path, shardwright_command):
    file = tmp_path / "plan.json"
    result = shardwright_command("plan", target, "--machine", "2xcpu", "--all", "-o", file)
    assert result.exit_code == 0, result.exception
    first, second, third, blank, *_ = result.stdout.splitlines()
    assert first == (
        "fits with 7.16 GiB to spare on 2 devices of 2xcpu: 80.0 ms a step, 300 MiB per device of"
        " 7.45 GiB"
    )
    assert second == "DDP 2 · no pipeline (none was searched; --stages 1,2 does)"
    assert (third, blank) == ("float32, as the job builds the model", "")
    for text in (
        "data parallel",
        "fully sharded",
        "chosen: DDP 2: dp=2 splits batch",
        "because it is the fastest of 3 plans",
        "faster than data parallel, the best of the baselines: communication",
        f"wrote {file}",
    ):
        assert text in result.stdout
    assert result.stderr == ""
    assert load_plan(file).step_seconds == 0.08


def test_without_output_nothing_is_written(api, target, tmp_path, monkeypatch, shardwright_command):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert shardwright_command("plan", target, "--machine", "2xcpu").exit_code == 0
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "__pycache__"}


def test_plan_json_holds_the_contracts_keys(api, target, tmp_path, as_json):
    file = tmp_path / "plan.json"
    found = as_json("plan", target, "--machine", "2xcpu", "-o", file)
    assert {
        "capture_seconds",
        "search_seconds",
        "step_seconds",
        "peak_bytes",
        "lower_bound_seconds",
        "devices",
        "mesh",
        "plan",
    } <= set(found)
    assert (found["devices"], found["mesh"], found["search_seconds"]) == (2, "dp=2", 0.25)
    assert found["plan"]["peak_bytes"] == found["peak_bytes"] == load_plan(file).peak_bytes
    assert found["file"] == str(file)


@pytest.mark.parametrize(
    "options, peak_mib",
    [
        ((), 300),
        (("--objective", "memory"), 80),
        (("--objective", "memory", "--micro-batches", "1"), 100),
        (("--memory-limit", "250MiB"), 200),
        (("--memory-limit", "104857600"), 100),
        (("--objective", "memory", "--memory-limit", "250MiB"), 80),
    ],
)
def test_objective_and_limit_choose_from_the_frontier(api, target, as_json, options, peak_mib):
    found = as_json("plan", target, "--machine", "2xcpu", *options)
    assert found["peak_bytes"] == peak_mib * 2**20


@pytest.mark.parametrize(
    "options, asked, chosen",
    [
        (("--memory-limit", "300MiB"), [None], 1),
        (("--memory-limit", "90MiB"), [None], 2),
        (("--micro-batches", "2,1"), [(1, 2)], 1),
        (("--micro-batches", "2", "--objective", "memory"), [(2,)], 2),
    ],
)
def test_micro_batches_are_tried_when_named_or_needed(api, target, as_json, options, asked, chosen):
    found = as_json("plan", target, "--machine", "2xcpu", *options)
    assert api.micro_batches == asked
    assert found["micro_batches"] == found["plan"]["micro_batches"] == chosen


def test_chunks_are_asked_for_by_their_numbers(api, target, as_json):
    as_json("plan", target, "--machine", "2xcpu", "--loss-chunks", "8,1")
    as_json("plan", target, "--machine", "2xcpu", "--mlp-chunks", "4")
    asked = [(options.loss_chunks, options.mlp_chunks) for options in api.asked]
    assert asked == [((1, 8), None), (None, (4,))]


@pytest.mark.parametrize("limit, devices", [("200MiB", 1), ("120MiB", 2), ("40MiB", 4)])
def test_the_fewest_devices_that_fit_are_found(api, target, as_json, limit, devices):
    found = as_json(
        "plan", target, "--machine", "8xcpu", "--objective", "devices", "--memory-limit", limit
    )
    assert found["devices"] == devices
    assert [n for n, _ in api.searched] == list(range(1, devices + 1))


def test_the_fewest_devices_share_the_seconds_and_skip_what_cannot_hold_the_weights(
    api, target, as_json, monkeypatch
):
    of_target = "shardwright.cli.planning.capturing.CapturedTarget.state_bytes"
    monkeypatch.setattr(of_target, lambda *_: 500 * 2**20)
    options = ("--objective", "devices", "--memory-limit", "120MiB", "--seconds", "12")
    found = as_json("plan", target, "--machine", "8xcpu", *options)
    assert found["devices"] == 5
    assert [n for n, _ in api.searched] == [5]
    assert 0 < api.asked[0].seconds <= 3  # of four machines that may do: 5 to 8 devices


def test_machines_that_constraints_rule_out_are_no_answer_to_how_few(api, target, as_json):
    api.refused = {1, 2, 3}
    options = ("--objective", "devices", "--memory-limit", "200MiB", "--mesh", "dp=2,tp=2")
    assert as_json("plan", target, "--machine", "8xcpu", *options)["devices"] == 4


def test_constraints_and_seconds_are_handed_to_the_search(api, target, as_json):
    options = (
        "--pin",
        "0=tp:features",
        "--forbid",
        "*=*:whole",
        "--mesh",
        "tp=2",
        "--mesh",
        "dp=2",
    )
    as_json("plan", target, "--machine", "2xcpu", *options, "--cap", "tp=4", "--seconds", "7")
    (asked,) = api.asked
    assert set(map(str, asked.constraints)) == {
        "pin 0=tp:features",
        "forbid *=*:whole",
        "mesh tp=2",
        "mesh dp=2",
        "cap tp=4",
    }
    assert asked.seconds == 7


def test_the_devices_own_memory_is_the_default_limit(api, target, shardwright_command):
    result = shardwright_command("plan", target, "--machine", "2xcpu")
    assert "300 MiB per device of 7.45 GiB" in result.stdout


def test_the_jobs_optimizer_is_planned_unless_another_is_named(api, target, as_json):
    as_json("plan", target, "--machine", "2xcpu")
    as_json("plan", target, "--machine", "2xcpu", "--optimizer", "adamw")
    assert api.searched == [(2, "sgd"), (2, "adamw")]


def test_the_jobs_habits_are_planned_unless_others_are_given(api, target, as_json):
    def planned(*options):
        found = as_json("plan", target, "--machine", "2xcpu", *options)["plan"]
        return found["rng"], found["batch_norm"]

    assert planned() == ("exact", "exact")
    assert planned("--rng", "fast", "--batch-norm", "local") == ("fast", "local")
    half = as_json("plan", target, "--machine", "2xcpu", "--precision", "bf16", "--reduce", "bf16")
    assert half["plan"]["reduce"] == "bf16"
    single = as_json("plan", target, "--machine", "2xcpu", "--norms", "model")
    assert (single["plan"]["norms"], half["plan"]["norms"]) == ("model", "fused")
    cast = as_json("plan", target, "--machine", "2xcpu", "--logits", "model")
    assert (cast["plan"]["logits"], half["plan"]["logits"]) == ("model", "fused")
    file = Path(target.rpartition(":")[0])
    file.write_text(file.read_text().replace("[batch], 3)", "[batch], 3, rng='fast')"))
    assert planned() == ("fast", "exact")
    assert planned("--rng", "exact", "--batch-norm", "local") == ("exact", "local")


@pytest.mark.hf
def test_a_config_is_planned_in_its_dtype_where_devices_are_faster_in_it(api, tmp_path, as_json):
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128}
    fields = {"model_type": "llama", "num_attention_heads": 4, "dtype": "bfloat16", **sizes}
    file.write_text(json.dumps(fields))

    def planned(machine, *options):
        options = ("--batch", "2", "--seq", "16", "--machine", machine, *options)
        found = as_json("plan", file, *options)
        return found["plan"]["precision"], found["precision"].partition(":")[0]

    assert planned("2xH100") == ("bf16", "bf16 mixed precision, from config.json")
    assert planned("2xH100", "--precision", "model") == ("model", "float32, as asked")
    assert planned("2xcpu")[0] == "model"


def test_a_model_that_needs_weights_to_be_captured_is_built_with_them(
    api, target, as_json, monkeypatch
):
    seen = []

    def capture(model, *call, **numerics):
        seen.append(next(model.parameters()).is_meta)
        if seen[-1]:
            raise WeightsNeededError("it branches")
        return type(api).capture(api, model, *call, **numerics)

    monkeypatch.setattr(api, "capture", capture)
    assert as_json("plan", target, "--machine", "2xcpu")["devices"] == 2
    assert seen == [True, False]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--machine", "2xcpu", "--rng", "quick"), "'quick' is not one of 'exact', 'fast'"),
        (("--machine", "2xtoaster"), "no preset for 'toaster'; known kinds are"),
        (("--machine", "fast"), "machine 'fast' is not [HOSTSx]DEVICESxKIND"),
        (("--machine", "nowhere.toml"), "cannot read machine nowhere.toml"),
        (
            ("--machine", "2xcpu", "--memory-limit", "lots"),
            "'--memory-limit': memory 'lots' is not a number with a unit; write it as 40GiB",
        ),
        (
            ("--machine", "2xcpu", "--memory-limit", "50MiB"),
            "no plan for 2 devices of 2xcpu fits into 50.0 MiB per rank; the smallest needs",
        ),
        (
            ("--machine", "2xcpu", "--objective", "devices", "--memory-limit", "50MiB"),
            "no plan on 1 to 2 devices of 2xcpu fits 50.0 MiB per rank; the smallest needs 80.0",
        ),
        (
            ("--machine", "2xcpu", "--micro-batches", "0,2"),
            "'--micro-batches': '0,2' is no list of counts, as 1,2,4,8",
        ),
        (("--machine", "2xcpu", "--objective", "fun"), "'fun' is not one of 'time', 'memory'"),
        (("--machine", "2xcpu", "--pin", "mlp"), "'pin mlp' is not GLOB=AXIS:WORD; write it as"),
        (("--machine", "2xcpu", "--mesh", "dp"), "'dp' is not name=size, as in 'dp=2 tp=4'"),
        (("--machine", "2xcpu", "--cap", "tp=none"), "'cap tp=none' is no cap; write it as"),
        (("--machine", "2xcpu", "--seconds", "soon"), "'soon' is not a valid float"),
        (("--machine", "2xcpu", "--method", "luck"), "'luck' is not one of 'joint', 'kcut'"),
        (("--machine", "2xcpu", "--batch", "8"), "brings its own batch; --batch and --seq belong"),
        ((), "Missing option '--machine'"),
    ],
)
def test_a_mistake_is_one_line(api, target, mistake, options, message):
    assert message in mistake("plan", target, *options)


def test_a_mistake_leaves_no_plan_file(api, target, tmp_path, mistake):
    file = tmp_path / "plan.json"
    mistake("plan", target, "--machine", "2xcpu", "--memory-limit", "1MiB", "-o", file)
    assert not file.exists()


def test_a_file_that_cannot_be_written_is_a_mistake(api, target, tmp_path, mistake):
    file = tmp_path / "nowhere" / "plan.json"
    assert f"cannot write {file}" in mistake("plan", target, "--machine", "2xcpu", "-o", file)


def test_a_missing_target_is_a_mistake(api, mistake):
    line = mistake("plan", "nowhere.py:job", "--machine", "2xcpu")
    assert line == "shardwright: there is no file nowhere.py; a target is file.py:function"


def test_the_method_is_handed_on(api, target, as_json):
    as_json("plan", target, "--machine", "2xcpu")
    as_json("plan", target, "--machine", "2xcpu", "--method", "kcut")
    as_json("plan", target, "--machine", "2xcpu", "--method", "kcut", "--objective", "devices")
    assert api.methods == ["joint", "kcut", "kcut"]


def test_as_many_processes_search_as_there_are_cores_or_as_are_asked_for(
    api, target, monkeypatch, shardwright_command
):
    command = "plan", target, "--machine", "2xcpu"
    for cores in (3, 100):
        monkeypatch.setattr(
            "shardwright.planner.processes.forked_map.usable_cores", lambda n=cores: n
        )
        assert shardwright_command(*command).exit_code == 0
    assert shardwright_command(*command, "--processes", "12").exit_code == 0
    assert [options.processes for options in api.asked] == [3, 8, 12]
    assert "default: (cores, up to 8)" in " ".join(
        shardwright_command("plan", "--help").stdout.split()
    )
