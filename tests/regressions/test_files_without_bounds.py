"""What is no file, or one of gigabytes, is refused at once by every command that reads one.

`report --trace` and `simulate --measured` waited for ever on a pipe, and read files of any size;
nested brackets in a trace ended in a traceback, and so did a whole number beyond 64 bits in a
machine file. All commands run in one process that may use a GiB and ten seconds.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.machine.files.toml import to_toml
from shardwright.machine.presets import preset
from shardwright.plan_io.files import save_plan
from tests.harness import plans

RUN = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
from click.testing import CliRunner
from shardwright.cli import main
for command in json.load(sys.stdin):
    found = CliRunner().invoke(main, command)
    raised = "" if isinstance(found.exception, SystemExit) else repr(found.exception)
    print(json.dumps([command, found.exit_code, found.stderr, raised]), flush=True)
"""
EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:job"
SIZES = ("--batch", "2", "--seq", "8", "--machine", "2xcpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pipes, devices and files of 64 GiB, by what they should be; and a folder with a plan."""
    folder = tmp_path_factory.mktemp("files")
    save_plan(plans.timed(plans.transformer()), folder / "plan.json")
    found = []
    for name in ("a.json", "a.toml"):
        os.mkfifo(folder / f"pipe_{name}")
        (folder / f"device_{name}").symlink_to("/dev/zero")
        with (folder / f"large_{name}").open("wb") as file:
            file.truncate(2**36)
        (folder / f"nested_{name}").write_text("[" * 10**5)
    for kind in ("pipe", "device", "large", "nested"):
        found.append([str(folder / f"{kind}_{name}") for name in ("a.json", "a.toml")])
    return folder, found


def commands(folder, found):
    plan, out = str(folder / "plan.json"), str(folder / "out")
    for data, table in found:
        yield "explain", data
        yield "diff", plan, data
        yield "report", data, "-o", out
        yield "report", plan, "--trace", data, "-o", out
        yield "report", plan, "--measured", data, "-o", out
        yield "simulate", data
        yield "simulate", plan, "--measured", data, "-o", out
        yield "export", data, "--to", "torchtitan"
        yield "plan", data, *SIZES
        yield "plan", EXAMPLE, "--machine", table
        yield "audit", data
        yield "audit", table
    machine = to_toml(preset("2x8xA100"))
    for number, (old, new) in enumerate(
        (
            ("size = 8", f"size = {2**62}"),
            ("size = 8", f"size = {10**30}"),
            ("product_depth = ", f"product_depth = {10**30} # "),
            ("memory = ", f'memory = "{2**62}GB" # '),
        )
    ):
        assert old in machine
        (folder / f"{number}.toml").write_text(machine.replace(old, new, 1))
        yield "plan", EXAMPLE, "--machine", str(folder / f"{number}.toml")
    for name, fields in {
        "layers": {"num_hidden_layers": 10**9},
        "experts": {"num_local_experts": 10**9},
        "labels": {"num_labels": 2**62},
        "image": {"image_size": 2**30},
        "vocabulary": {"vocab_size": 2**70},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps({"model_type": "llama", **fields}))
        yield "plan", str(folder / f"{name}.json"), *SIZES


def test_they_are_refused_within_a_gib_and_ten_seconds(files):
    asked = list(commands(*files))
    ended = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == len(asked), (asked[len(answers)], ended.stderr[-2000:])
    for command, status, text, raised in answers:
        assert (status, raised) == (2, ""), (command, text, raised)
        assert text.startswith("shardwright: ") and text.count("\n") == 1, command
        given = [word for word in command if word.endswith((".json", ".toml"))]
        assert any(os.path.basename(word) in text for word in given), (command, text)
