import multiprocessing
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shardwright.ir.atomic_io import write_atomically
from shardwright.machine.files.loading import load_machine
from shardwright.machine.files.toml import to_toml
from shardwright.machine.measurement import Measured
from shardwright.machine.model import MachineError
from shardwright.machine.presets import preset
from shardwright.profile import measure
from shardwright.profile.measure import measure_host, ranks_of_a_host

AT = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.mark.ranks
def test_two_processes_measure_this_host_and_remember_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    machine = measure_host(2, 0.5, tell=lambda what, part: told.append((what, part)))
    assert machine.devices == 2
    assert "measured on" in machine.provenance
    assert datetime.now(UTC) - machine.measured.at < timedelta(minutes=5)
    assert 0 <= machine.measured.busy <= 1
    assert dict(machine.device.flop_per_s).keys() >= {"float32", "float64"}
    assert machine.device.peak_flop_per_s("float32") > 1e8
    assert 1e8 < machine.device.bytes_per_s < 1e13
    # A copy to the host reads and writes each byte.
    assert 0 < machine.device.host_bytes_per_s <= machine.device.bytes_per_s / 2
    assert 1e-7 < machine.device.launch_seconds < 1e-2
    assert machine.levels[0].bytes_per_s > 1e6
    assert 0 <= machine.overlap <= 1
    assert machine.device.launch_seconds < machine.device.dispatch_seconds < 1e-2
    assert machine.device.parameter_seconds > 0
    errors = {kind: (middle, most) for kind, middle, most in machine.measured.errors}
    assert errors.keys() >= {"matmul", "memory", "update", "host all_reduce", "host all_gather"}
    assert all(0 <= middle <= most for middle, most in errors.values())
    parts = [part for _, part in told]
    assert parts == sorted(parts) and 0 <= parts[0] < parts[-1] <= 1
    # What is told is read now and then, so that a busy host may miss some of it.
    assert {what.split()[0] for what, _ in told} & {*errors, "host", "round"}
    assert not multiprocessing.active_children()
    assert not machine.measured.tuned_host

    (file,) = (tmp_path / "shardwright").iterdir()
    assert load_machine(file) == machine
    believed = replace(machine, measured=replace(machine.measured, busy=0.0, errors=()))
    file.write_text(to_toml(believed))
    started = time.monotonic()
    assert measure_host(2) == believed
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
    with pytest.raises(MachineError, match="did not get beyond their start in time"):
        measure_host(1, seconds_budget=0.0, cache_dir=tmp_path)
    assert not multiprocessing.active_children()


def test_a_remembered_machine_is_read_and_a_damaged_one_measured_again(tmp_path, monkeypatch):
    found = iter([_measured("2xcpu"), _measured("2x2xcpu")])
    monkeypatch.setattr(measure, "_measure", lambda devices, budget, tell, tuned: next(found))
    first = measure_host(2, cache_dir=tmp_path)
    assert measure_host(2, cache_dir=tmp_path) == first
    (file,) = tmp_path.iterdir()
    file.write_text("name = ")
    assert measure_host(2, cache_dir=tmp_path).name == "2x2xcpu"


@pytest.mark.parametrize(
    "doubtful",
    [
        {"busy": 0.5},
        {"errors": (("matmul", 0.01, 0.1), ("host all_reduce", 0.9, 1.5))},
    ],
)
def test_figures_that_are_doubtful_are_measured_again_the_next_time(
    doubtful, tmp_path, monkeypatch
):
    found = iter([_measured("2xcpu", **doubtful), _measured("2x2xcpu")])
    monkeypatch.setattr(measure, "_measure", lambda devices, budget, tell, tuned: next(found))
    assert measure_host(2, cache_dir=tmp_path).measured.doubts
    assert measure_host(2, cache_dir=tmp_path).name == "2x2xcpu"
    assert measure_host(2, cache_dir=tmp_path).name == "2x2xcpu"


def test_figures_that_say_nothing_of_their_measurement_are_measured_again(tmp_path, monkeypatch):
    found = iter([preset("2xcpu"), _measured("2x2xcpu")])
    monkeypatch.setattr(measure, "_measure", lambda devices, budget, tell, tuned: next(found))
    measure_host(2, cache_dir=tmp_path)
    assert measure_host(2, cache_dir=tmp_path).name == "2x2xcpu"


def test_processes_that_are_slow_but_go_on_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_rank", _slow)
    monkeypatch.setattr(measure, "START_SECONDS", 20.0)
    told = []
    machine = measure_host(
        1, seconds_budget=0.0, cache_dir=tmp_path, tell=lambda what, part: told.append(what)
    )
    assert machine.name == "1xcpu" and told


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measure", lambda devices, budget, tell, tuned: preset("2xcpu"))
    (tmp_path / "file").touch()
    assert measure_host(2, cache_dir=tmp_path / "file" / "folder").name == "2xcpu"


@pytest.mark.parametrize(("said", "found"), [(None, 4), ("2", 2), ("1", 1), ("3", 4), ("0", 4)])
def test_torchrun_says_how_many_ranks_a_host_has(monkeypatch, said, found):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if said is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert ranks_of_a_host(4) == found


def test_no_devices_cannot_be_measured():
    with pytest.raises(MachineError, match="0 devices to measure; ask for at least one"):
        measure_host(0)


def _measured(name, busy=0.0, errors=()):
    return replace(preset(name), measured=Measured(AT, busy, errors))


def _slow(rank, devices, folder, seconds_budget, tune_host):
    for number in range(3):
        write_atomically(Path(folder) / "progress.txt", f"{number / 3}\nround {number}")
        time.sleep(0.2)
    write_atomically(Path(folder) / "result", to_toml(preset("1xcpu")))


def _fail(rank, devices, folder, seconds_budget, tune_host):
    with open(f"{folder}/error.txt", "w") as file:
        file.write("no luck")
    raise SystemExit(1)


def _hang(rank, devices, folder, seconds_budget, tune_host):
    time.sleep(600)


class _Gpu:
    """A device of 80 bytes, of which tensors have 10 and are given 12."""

    def __init__(self, free):
        self.free = free

    def mem_get_info(self):
        return self.free, 80

    def memory_reserved(self):
        return 12


def test_what_is_neither_free_nor_torchs_is_the_contexts():
    assert measure.context_bytes(_Gpu(60)) == 8
    assert measure.context_bytes(_Gpu(70)) == 0  # torch gave some back in between
