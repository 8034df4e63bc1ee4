from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning.named_machines import machine_of
from shardwright.machine.files.loading import load_machine
from shardwright.machine.measurement import Measured
from shardwright.machine.presets import preset
from shardwright.profile import measure

QUIET = Measured(datetime.now(UTC) - timedelta(days=3, hours=1), 0.01, (("matmul", 0.02, 0.1),))


@pytest.fixture
def measured(monkeypatch):
    asked = []

    def host(devices, seconds, *, tell, anew, tune_host):
        tell("matmul float32", 0.5)
        asked.append((devices, seconds, anew, tune_host))
        return preset(f"{devices}xcpu")

    monkeypatch.setattr(measure, "measure_host", host)
    return asked


def test_profile_writes_a_machine_that_can_be_planned_for(tmp_path, measured, shardwright_command):
    file = tmp_path / "machine.toml"
    result = shardwright_command("profile", "-o", file, "--devices", "3", "--seconds", "5")
    assert result.exit_code == 0, result.exception
    assert measured == [(3, 5.0, True, False)]
    assert load_machine(file) == preset("3xcpu")
    assert "float32 80 GFLOP/s" in result.stdout
    assert f"use it as --machine {file}" in " ".join(result.stdout.split())


def test_profile_json_has_the_figures(tmp_path, measured, as_json):
    found = as_json("profile", "-o", tmp_path / "machine.toml", "--devices", "2")
    assert found["devices"] == 2 and found["flop_per_s"]["float32"] == 80e9
    assert "assumed" in found["provenance"]


def test_what_ranks_wait_for_the_last_is_told(tmp_path, measured, monkeypatch, shardwright_command):
    asked = shardwright_command("profile", "-o", tmp_path / "same.toml", "--devices", "2")
    assert "for the last one" not in asked.stdout

    def host(devices, seconds, *, tell, anew, tune_host=False):
        return replace(preset(f"{devices}xcpu"), arrival_skew_seconds=2.5e-4)

    monkeypatch.setattr(measure, "measure_host", host)
    asked = shardwright_command("profile", "-o", tmp_path / "apart.toml", "--devices", "2")
    words = " ".join(asked.stdout.split())
    assert "after computing for 10.0 ms a rank waits 0.25 ms for the last one" in words


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path, measured, mistake
):
    line = mistake("profile", "-o", tmp_path / "nowhere" / "machine.toml")
    assert "No such file or directory; choose another path" in line
    assert measured == []


def test_devices_are_torchruns_matter_under_torchrun(tmp_path, measured, mistake, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = mistake("profile", "-o", tmp_path / "machine.toml", "--devices", "2")
    assert "torchrun, which has started 4 ranks; leave it out" in line


def test_without_a_file_what_here_takes_is_measured_again(measured, shardwright_command):
    result = shardwright_command("profile", "--devices", "2", "--seconds", "5")
    assert result.exit_code == 0 and measured == [(2, 5.0, True, False)]
    assert "kept for --machine here with 2 devices" in result.stdout
    result = shardwright_command("profile", "--devices", "2", "--seconds", "5", "--tune-host")
    assert result.exit_code == 0 and measured[1:] == [(2, 5.0, True, True)]
    assert "kept for `run --tune-host` with 2 devices" in result.stdout


def test_ranks_of_torchrun_need_a_file(measured, mistake, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert "give its path with -o machine.toml" in mistake("profile")


def test_a_doubtful_measurement_warns(tmp_path, monkeypatch, shardwright_command):
    found = replace(preset("2xcpu"), measured=replace(QUIET, busy=0.6))
    monkeypatch.setattr(measure, "measure_host", lambda *given, **options: found)
    result = shardwright_command("profile", "-o", tmp_path / "machine.toml")
    assert "others took 60% of the cores; median error of the fit: matmul 2% (at most 10%)" in (
        " ".join(result.stdout.split())
    )
    said = " ".join(result.stderr.split())
    assert said == ("warning: other programs took 60% of the cores meanwhile; measure again")


@pytest.mark.parametrize(
    "busy, says",
    [
        (0.01, "2xcpu: measured 3 days ago; `shardwright profile --devices 2` measures again"),
        (
            0.6,
            "warning: the figures of this host are doubtful: other programs took 60% of the cores"
            " meanwhile; they are measured again the next time, or now by `shardwright profile"
            " --devices 2`",
        ),
    ],
)
def test_who_plans_for_this_host_is_told_from_when_its_figures_are(busy, says, monkeypatch, capsys):
    found = replace(preset("2xcpu"), measured=replace(QUIET, busy=busy))
    monkeypatch.setattr(measure, "measure_host", lambda *given, **options: found)
    assert machine_of(MachineOptions("here", {}), 2) == found
    said = capsys.readouterr()
    assert said.out == "" and " ".join(said.err.split()) == says
