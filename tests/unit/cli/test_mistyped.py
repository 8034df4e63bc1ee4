"""What honest users mistype is one line and exit status 2, never a traceback or a hang.

A `config.json` of ViT with `--batch` had no way to be planned, `--set hidden_size=33` for 4 heads
and a trace that is no text were tracebacks, a hub name "brought its own batch", an efficiency of
5e-324 gave "there is no pipeline of 1 stages", and a million million devices were searched.
"""

import json
import re
from pathlib import Path

import pytest

from shardwright.machine.files.toml import to_toml
from shardwright.machine.presets import preset
from shardwright.train.targets.target import TargetError, build_model, load_job

VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 16, "image_size": 8, "patch_size": 4, "num_channels": 3},
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 32},
}


def config(folder, data):
    (folder / "config.json").write_text(json.dumps(data))
    return str(folder / "config.json")


@pytest.mark.hf
def test_a_classifier_of_images_needs_no_seq(tmp_path):
    for target in (config(tmp_path, VIT), str(tmp_path)):
        job = load_job(target, 2)
        args, kwargs = job.call()
        assert args == ()
        assert tuple(kwargs["pixel_values"].shape) == (2, 3, 8, 8)
        assert tuple(kwargs["labels"].shape) == (2,)
        build_model(job)(**kwargs).loss.backward()


@pytest.mark.hf
@pytest.mark.parametrize(
    "data, sizes, settings, says",
    [
        (VIT, (2, 8), (), "--seq 8: .*config.json takes images; leave it out"),
        (VIT, (2, None), ("image_size=[8]",), r"image_size \[8\]; give pixels"),
        (
            {**VIT, "architectures": ["ViTModel"]},
            (2, None),
            (),
            "what ViTModel is trained on is not",
        ),
        (LLAMA, (2, None), (), "tokens per sequence are missing, as in --batch 2 --seq"),
        (LLAMA, (2, 8), ("hidden_size=33",), r"--set hidden_size=33: .*\(33\) is not a multiple"),
        (LLAMA, (2, 8), ("hidden_size=0",), "--set hidden_size=0: a whole number from 1 to"),
        (
            LLAMA,
            (2, 8),
            ("num_hidden_layers=-1",),
            "--set num_hidden_layers=-1: a whole number from 1",
        ),
        (
            LLAMA,
            (2, 8),
            ("num_hidden_layers=x",),
            "num_hidden_layers=.x.: a whole number of 1 or more is needed",
        ),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, data, sizes, settings, says):
    with pytest.raises(TargetError, match=says):
        load_job(config(tmp_path, data), *sizes, settings)


def test_targets_that_are_none(mistake, tmp_path):
    def plan(target, *options):
        return mistake("plan", target, "--machine", "2xcpu", *options)

    line = plan("meta-llama/Llama-3-8B", "--batch", "8", "--seq", "16")
    assert "nothing is fetched from a hub: download its config.json and name that file" in line
    assert "is a folder without a config.json" in plan(tmp_path)
    file = tmp_path / "leaves.py"
    file.write_text("raise SystemExit(3)")
    assert "leaves.py cannot be imported: SystemExit at line 1: 3" in plan(f"{file}:job")


@pytest.mark.parametrize(
    "key, figure, says",
    [
        ("bandwidth", '"5e-324B/s"', "level host: bandwidth is '5e-324B/s'; give 1B/s to"),
        ("memory_bandwidth", '"1e290B/s"', "device.memory_bandwidth is '1e290B/s'; give 1B/s to"),
        ("float32", '"1e-300FLOP/s"', "device.compute.float32 is '1e-300FLOP/s'; give 1FLOP/s to"),
        ("latency", '"1e300s"', "level host: latency is '1e300s'; give at most an hour"),
        ("memory", '"1e290GB"', "device.memory is '1e290GB'; give at most 1000PB"),
        ("matmul", "5e-324", "device.efficiency.matmul is 5e-324; give a part of at least 1e-09"),
        ("size", "1000000000000", "has 1000000000000 devices; plan for at most 1048576"),
    ],
)
def test_an_absurd_figure_names_file_and_key(mistake, target, tmp_path, key, figure, says):
    text = to_toml(preset("2xcpu"))
    changed = re.sub(rf"(?m)^{key} = .*$", f"{key} = {figure}", text, count=1)
    assert changed != text
    file = tmp_path / "cluster.toml"
    file.write_text(changed)
    line = mistake("plan", target, "--machine", file)
    assert f"machine {file}: " in line
    assert says in line


@pytest.mark.parametrize(
    "options, says",
    [
        (("--machine", "999999999999xcpu"), "plan for at most 1048576"),
        (("--machine", "2xcpu", "--seconds", "nan"), "nan is no number"),
        (("--machine", "2xcpu", "--micro-batches", "²"), "is no list of counts"),
    ],
)
def test_numbers_that_are_none(mistake, target, options, says):
    assert says in mistake("plan", target, *options)


def test_files_beside_a_report(mistake, plan_file, tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "beside.json"
    file.write_bytes(b"\xff\xfe{")
    assert "it is no text" in mistake("report", plan_file, "-o", page, "--trace", file)
    for measured in ("NaN", "-1", "0", '"1"'):
        file.write_text(f'{{"predicted_step_seconds": 1, "measured_step_seconds": {measured}}}')
        line = mistake("report", plan_file, "-o", page, "--measured", file)
        assert "is not an output of `run --json`" in line


@pytest.mark.parametrize(
    "options, says",
    [
        (("--time-operators", "nan"), "nan is no number"),
        (("--optimizer", ""), "'--optimizer': optimizer '' is not known; use one of sgd"),
        (("--optimizer", "AdaFoo"), "'--optimizer': optimizer 'adafoo' is not known"),
        (("--mesh", "mb=2"), "mesh mb=2: mb is the axis of micro-batches; name it otherwise"),
        (("--set-machine", "memory=8GB,memory=9GB"), "memory occurs twice"),
        (("--set", "layers=1", "--set", "layers=2"), "--set layers is there twice; give it once"),
    ],
)
def test_options_that_passed_in_silence(mistake, target, options, says):
    assert says in mistake("plan", target, "--machine", "2xcpu", *options)


@pytest.mark.parametrize(
    "options, says",
    [
        (("--stall-timeout", "nan"), "nan is no number of seconds"),
        (("--stall-timeout", "inf"), "inf is no number of seconds"),
        (("--start-timeout", "1e400"), "inf is no number of seconds"),
        (("--every", "5"), "--every is an option of checkpoints: give --checkpoint DIR"),
        (("--keep", "5"), "--keep is an option of checkpoints: give --checkpoint DIR"),
        (("--wait-for-saves",), "--wait-for-saves is an option of checkpoints"),
        (("--steps", "2", "--trace", "/tmp/step.json"), "step 3 of a run, and this one has 2"),
        (("--export", "folder"), "Linear is no Hugging Face model, so no folder is written"),
        (("--weights", __file__), "test_mistyped.py is no safetensors file, or a part of one"),
        (("--weights", str(Path(__file__).parent)), "cannot read "),
        (("--devices", "99999999999999999999"), "is not in the range 1<=x<=1024"),
    ],
)
def test_what_ended_a_run_late_is_told_before_the_search(api, mistake, target, options, says):
    assert says in mistake("run", target, "--machine", "2xcpu", "--devices", "2", *options)
    assert api.searched == []


@pytest.mark.parametrize(
    "option",
    [
        ("--machine", "4xcpu"),
        ("--set-machine", "memory=4GiB"),
        ("--memory-limit", "4GiB"),
        ("--seconds", "3"),
        ("--time-operators", "3"),
        ("--micro-batches", "2"),
        ("--stages", "2"),
        ("--async",),
        ("--set", "machine=4xcpu"),
    ],
)
def test_options_of_planning_do_not_change_a_plan(mistake, target, plan_file, option):
    line = mistake("run", target, plan_file, *option)
    assert f"{plan_file} is finished, '{option[0]}" in line


@pytest.mark.parametrize(
    "command",
    [
        ("profile", "--seconds", "nan"),
        ("profile", "--devices", "1000000"),
        ("doctor", "--ranks", "1000000"),
        ("doctor", "--ranks", "-1"),
    ],
)
def test_this_host_is_asked_for_what_it_can_have(mistake, command):
    assert f"Invalid value for '{command[1]}'" in mistake(*command)


def test_a_report_with_a_trace_of_no_name(mistake, plan_file, tmp_path):
    line = mistake("report", plan_file, "-o", tmp_path / "page.html", "--trace", "")
    assert "cannot read" in line


@pytest.mark.hf
def test_more_micro_batches_than_sequences(mistake, tmp_path):
    options = ("--batch", "2", "--seq", "8", "--machine", "2xcpu", "--micro-batches", "4,8")
    line = mistake("plan", config(tmp_path, LLAMA), *options)
    assert "a batch of 2 cannot be cut into 4 micro-batches" in line


def test_a_missing_choice_is_said_in_sentences(mistake, plan_file):
    assert "split-spec, torchtitan. Format to write. See" in mistake("export", plan_file)


@pytest.mark.hf
def test_sizes_that_a_config_does_not_name_are_told(tmp_path, shardwright_command):
    """A config with nothing but its model type was planned as Llama-7B without a word."""
    sizes = ("--batch", "2", "--seq", "8", "--machine", "2xcpu")
    known = shardwright_command("plan", config(tmp_path, LLAMA), *sizes)
    assert "parameters, 16 tokens a step\n" in known.stdout
    few = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
    settings = ("--set", "intermediate_size=16")
    told = shardwright_command("plan", config(tmp_path, few), *sizes, *settings)
    assert "names no number of layers: transformers' default" in " ".join(told.stdout.split())
