import pytest

from shardwright.ir.machine import Machine
from shardwright.runtime import measure


@pytest.fixture
def measured(monkeypatch):
    asked = []

    def host(devices, seconds, *, tell, anew):
        tell("matmul float32", 0.5)
        asked.append((devices, seconds, anew))
        return Machine.preset(f"{devices}xcpu")

    monkeypatch.setattr(measure, "measure_host", host)
    return asked


def test_profile_writes_a_machine_that_can_be_planned_for(tmp_path, measured, shardwright_command):
    file = tmp_path / "machine.toml"
    result = shardwright_command("profile", "-o", file, "--devices", "3", "--seconds", "5")
    assert result.exit_code == 0, result.exception
    assert measured == [(3, 5.0, True)]
    assert Machine.load(file) == Machine.preset("3xcpu")
    assert "float32 80 GFLOP/s" in result.stdout
    assert f"use it as --machine {file}" in " ".join(result.stdout.split())


def test_profile_json_has_the_figures(tmp_path, measured, as_json):
    found = as_json("profile", "-o", tmp_path / "machine.toml", "--devices", "2")
    assert found["devices"] == 2 and found["flop_per_s"]["float32"] == 80e9
    assert "assumed" in found["provenance"]


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path, measured, mistake
):
    line = mistake("profile", "-o", tmp_path / "nowhere" / "machine.toml")
    assert "is no folder to write to" in line
    assert measured == []


def test_devices_are_torchruns_matter_under_torchrun(tmp_path, measured, mistake, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = mistake("profile", "-o", tmp_path / "machine.toml", "--devices", "2")
    assert "torchrun, which has started 4 ranks; leave it out" in line
