import multiprocessing
import time

import pytest

from shardwright.ir.machine import Machine, MachineError
from shardwright.runtime import measure
from shardwright.runtime.measure import measure_host


@pytest.mark.ranks
def test_two_processes_measure_this_host_and_remember_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    machine = measure_host(2, 0.5, tell=lambda what, part: told.append((what, part)))
    assert machine.devices == 2
    assert "measured on" in machine.provenance
    assert dict(machine.device.flop_per_s).keys() >= {"float32", "float64"}
    assert machine.device.peak_flop_per_s("float32") > 1e8
    assert 1e8 < machine.device.bytes_per_s < 1e13
    assert 1e-7 < machine.device.launch_seconds < 1e-2
    assert machine.levels[0].bytes_per_s > 1e6
    assert 0 <= machine.overlap <= 1
    assert "median error of the fit: matmul" in machine.provenance
    assert "host all_gather" in machine.provenance
    parts = [part for _, part in told]
    assert parts == sorted(parts) and 0 <= parts[0] < parts[-1] <= 1
    assert any(what.startswith("memory ") for what, _ in told)
    assert not multiprocessing.active_children()

    (file,) = (tmp_path / "shardwright").iterdir()
    assert Machine.load(file) == machine
    started = time.monotonic()
    assert measure_host(2) == machine
    assert time.monotonic() - started < 1


@pytest.mark.ranks
def test_processes_that_fail_are_reported_and_cleaned_up(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_rank", _fail)
    with pytest.raises(
        MachineError, match=r"measuring 2 devices .* failed: no luck; ask for fewer"
    ):
        measure_host(2, cache_dir=tmp_path)
    assert not multiprocessing.active_children()


@pytest.mark.ranks
def test_processes_that_hang_are_ended_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_rank", _hang)
    monkeypatch.setattr(measure, "START_SECONDS", 1.0)
    with pytest.raises(MachineError, match="did not finish in time"):
        measure_host(1, seconds_budget=0.0, cache_dir=tmp_path)
    assert not multiprocessing.active_children()


def test_a_remembered_machine_is_read_and_a_damaged_one_measured_again(tmp_path, monkeypatch):
    found = iter([Machine.preset("2xcpu"), Machine.preset("2x2xcpu")])
    monkeypatch.setattr(measure, "_measure", lambda devices, budget, tell: next(found))
    first = measure_host(2, cache_dir=tmp_path)
    assert measure_host(2, cache_dir=tmp_path) == first
    (file,) = tmp_path.iterdir()
    file.write_text("name = ")
    assert measure_host(2, cache_dir=tmp_path).name == "2x2xcpu"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measure", lambda devices, budget, tell: Machine.preset("2xcpu"))
    (tmp_path / "file").touch()
    assert measure_host(2, cache_dir=tmp_path / "file" / "folder").name == "2xcpu"


def test_no_devices_cannot_be_measured():
    with pytest.raises(MachineError, match="0 devices to measure; ask for at least one"):
        measure_host(0)


def _fail(rank, devices, folder, seconds_budget):
    with open(f"{folder}/error.txt", "w") as file:
        file.write("no luck")
    raise SystemExit(1)


def _hang(rank, devices, folder, seconds_budget):
    time.sleep(600)
