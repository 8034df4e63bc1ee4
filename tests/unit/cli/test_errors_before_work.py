"""Mistakes in arguments show before a model is captured or plans are searched.

`plan --mesh dp=3` for 8 devices captured the model first (6 s), `--memory-limit 40` was taken as 40
bytes and searched (24 to 35 s), `memory_limit=nan` and `search(graph, "2xcpu")` were tracebacks, a
preset with one other figure needed a whole TOML file. Each is one line at once now, or works.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.frontier import MemoryLimitError
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.files.loading import with_figures
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.model import MachineError
from shardwright.machine.presets import preset
from shardwright.tracing.call import CaptureError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def unseen(api, monkeypatch):
    """A command that fails if it captures anything."""

    def capture(*given, **named):
        raise AssertionError("captured")

    monkeypatch.setattr(api, "capture", capture)


@pytest.mark.parametrize(
    "command, options, says",
    [
        ("plan", ("--mesh", "dp=3"), "mesh dp=3 is of 3, not of 8 devices"),
        ("frontier", ("--mesh", "dp=3"), "mesh dp=3 is of 3, not of 8 devices"),
        ("frontier", ("--mesh", "dp=3", "--devices", "2,4"), "mesh dp=3 is of 3, not of 4 devices"),
        ("plan", ("--stages", "3"), "3 stages cannot share the 8 devices"),
        ("plan", ("--forbid", "*=zz:batch"), "there is no axis zz"),
        ("plan", ("--mesh", "dp=8", "--cap", "dp=4"), "no mesh of 8 devices is that narrow"),
        ("plan", ("--memory-limit", "40"), "memory '40' is 40 bytes; did you mean 40GiB?"),
        ("plan", ("--memory-limit", "0GiB"), "is no size"),
        ("plan", ("--memory-limit", "-4GiB"), "is not a number with a unit"),
        ("plan", ("--memory-limit", "nan"), "is not a number with a unit"),
        (
            "plan",
            ("--for", "accelerate", "-o", "a.yaml"),
            "--config a.yaml names the file of --for",
        ),
        ("plan", ("--set-machine", "memroy=72GiB"), "no figure 'memroy'; did you mean memory"),
        ("plan", ("--set-machine", "memory=72"), "device.memory is 72.0, without a unit"),
        ("plan", ("--set-machine", "overlap=2"), "overlap is 2.0; give a part"),
        ("frontier", ("--set-machine", "memory"), "'memory' is not NAME=VALUE"),
    ],
)
def test_a_command_says_it_without_capturing(
    unseen,
    target,
    mistake,
    command,
    options,
    says,
):
    assert says in mistake(command, target, "--machine", "8xcpu", *options)


@pytest.mark.parametrize(
    "machine, says",
    [
        ("8h100", "write it as 8xH100, or give"),
        ("8 x H100-PCIe", "write it as 8xH100-PCIe, or give"),
        ("H100", "write it as 8xH100 or 2x8xA100, or give"),
        ("none.toml", "cannot read machine none.toml: No such file or directory; give a TOML"),
    ],
)
def test_the_text_of_a_machine_is_corrected(unseen, target, mistake, machine, says):
    assert says in mistake("plan", target, "--machine", machine)


@pytest.mark.parametrize("command", ["run", "verify"])
def test_commands_that_start_ranks_are_not_started_by_torchrun(
    unseen, target, mistake, monkeypatch, plan_file, command
):
    """Each of two ranks started two more, and each pair trained the whole job."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = mistake(command, target, plan_file)
    assert f"{command} starts its ranks itself, and torchrun has started it 2 times" in line


def test_run_says_it_without_capturing(unseen, target, mistake):
    options = ("--machine", "2xcpu", "--devices", "2", "--mesh", "dp=3")
    assert "mesh dp=3 is of 3, not of 2 devices" in mistake("run", target, *options)
    assert "give --devices, the number" in mistake("run", target, "--machine", "2xcpu")


def test_a_limit_below_the_weights_is_refused_before_the_search(
    api,
    target,
    mistake,
    monkeypatch,
):
    of_target = "shardwright.cli.planning.capturing.CapturedTarget.state_bytes"
    monkeypatch.setattr(of_target, lambda *_: 8 * 2**30)
    line = mistake("plan", target, "--machine", "4xcpu", "--memory-limit", "1GiB")
    assert "weights, gradients and optimizer state alone need 2.0 GiB on each of 4" in line
    assert api.searched == []


def test_a_preset_with_another_figure(api, target, as_json):
    options = ("--machine", "4xcpu", "--set-machine", "memory=4GiB,host.bandwidth=1GB/s")
    found = as_json("plan", target, *options)
    assert found["plan"]["machine"] == "4xcpu with memory=4GiB, host.bandwidth=1GB/s"


def test_figures_are_those_of_machine_files_and_the_provenance_tells():
    found = with_figures(
        preset("2x8xA100"),
        memory="72GiB",
        overlap=0.6,
        **{"network.bandwidth": "100Gbit/s", "efficiency.matmul": 0.5},
    )
    assert found.device.memory_bytes == 72 * 2**30
    assert (found.overlap, found.levels[1].bytes_per_s) == (0.6, 12.5e9)
    assert found.device.efficiency.matmul == 0.5
    assert "changed: memory=72GiB, overlap=0.6" in found.provenance
    assert parse_toml(to_toml(found)) == found
    assert found.levels[0] == preset("2x8xA100").levels[0]
    assert type(sw.Machine.preset("8xH100").with_(memory="72GiB")) is sw.Machine
    with pytest.raises(MachineError, match=r"there are .*overlap, .*memory.*nvlink.bandwidth"):
        with_figures(found, colour="red")


@pytest.mark.parametrize("limit", [math.nan, math.inf, -math.inf, -1, 0, 0.0, True, "40", [40]])
def test_a_memory_limit_that_is_none(limit):
    with pytest.raises(MemoryLimitError, match="memory"):
        sw.plan(None, machine="2xcpu", memory_limit=limit)


def test_python_says_it_without_capturing():
    with pytest.raises(ConstraintError, match="mesh dp=3 is of 3"):
        sw.plan(None, machine="2xcpu", constraints=["mesh dp=3"])
    with pytest.raises(PipelineError, match="3 stages cannot share"):
        sw.plan(None, machine="2xcpu", stages=[3])
    with pytest.raises(MachineError, match="no preset for 'H1000'; did you mean H100"):
        sw.plan(None, machine="8xH1000")
    with pytest.raises(MachineError, match="machine is a int; give a Machine"):
        sw.plan(None, machine=8)
    with pytest.raises(CaptureError, match=r"model is <lambda>, which is no torch.nn.Module"):
        sw.capture(lambda x: x, (torch.ones(2),))


def test_python_takes_the_name_of_a_preset():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(4, 4)
    graph = sw.capture(_Loss(model), (x,))
    frontier = sw.search(graph, "2xcpu")
    assert frontier[0].machine == "2xcpu"
    assert sw.plan(_Loss(model), (x,), machine="2xcpu").devices == 2


def test_mistakes_in_arguments_are_told_without_torch(tmp_path):
    """Importing torch takes seconds; `--mesh` and `--stages` were checked by what needs it."""
    file = tmp_path / "job.py"
    file.write_text("raise AssertionError('imported')")
    code = """
import sys
from click.testing import CliRunner
from shardwright.cli import main
for line in sys.argv[1:]:
    result = CliRunner().invoke(main, line.split())
    print(result.exit_code, "torch" in sys.modules, result.stderr.strip())
"""
    options = {
        "--mesh dp=3": "mesh dp=3 is of 3, not of 8 devices",
        "--stages 3": "3 stages cannot share the 8 devices",
        "--forbid *=zz:batch": "there is no axis zz",
        "--method kcut --stages 2": "method 'kcut' cuts one mesh",
        "-o .": "it is a folder",
        "--batch 2": "brings its own batch",
    }
    targets = {
        "nowhere.py:job": "there is no file nowhere.py",
        "nowhere.json --batch 2": "cannot read nowhere.json: No such file",
        f"{tmp_path} --batch 2": "is a folder without a config.json",
    }
    lines = {f"plan {file}:job --machine 8xcpu {given}": says for given, says in options.items()}
    lines |= {f"plan {target} --machine 8xcpu": says for target, says in targets.items()}
    found = subprocess.check_output([sys.executable, "-c", code, *lines], cwd=ROOT, text=True)
    for line, says in zip(found.splitlines(), lines.values(), strict=True):
        assert line.startswith("2 False shardwright: ")
        assert says in line


class _Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).sum()
