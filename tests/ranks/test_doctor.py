"""What `doctor` says of this host: ranks are started for real."""

import json
from importlib import metadata

import pytest
from click.testing import CliRunner

from shardwright.cli import main
from shardwright.profile import doctor_checks
from shardwright.profile.doctor_checks import CheckState
from shardwright.runtime.ranks import RanksError


def doctor(*options):
    return CliRunner().invoke(main, ["doctor", *options])


@pytest.mark.ranks
def test_ranks_meet_and_are_timed():
    result = doctor("--ranks", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    last = found["checks"][-1]
    assert last["name"] == "2 ranks"
    assert "an all_reduce of 16 MiB takes" in last["text"]


def test_versions_and_devices_are_named():
    result = doctor("--ranks", "0")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"ok torch {metadata.version('torch')}" in lines
    assert lines[-1] == "ready to plan and train"
    assert not any("ranks" in line for line in lines)


def test_what_is_missing_says_how_to_get_it(monkeypatch):
    known = doctor_checks._version
    monkeypatch.setattr(doctor_checks, "_version", lambda n: None if n == "plotly" else known(n))
    result = doctor("--ranks", "0")
    assert result.exit_code == 0
    assert "plotly not installed, for shardwright report" in result.stdout
    assert "pip install 'shardwright[report]'" in result.stdout


def test_a_package_that_training_needs_fails(monkeypatch):
    known = doctor_checks._version
    monkeypatch.setattr(doctor_checks, "_version", lambda n: None if n == "click" else known(n))
    result = doctor("--ranks", "0", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    (failed,) = [c for c in found["checks"] if c["state"] == "failed"]
    assert (failed["name"], failed["remedy"]) == ("click", "pip install click")


def test_ranks_that_do_not_meet_are_a_finding(monkeypatch):
    def broken(*args, **kwargs):
        raise RanksError("2 ranks failed (1):\nno route to host")

    monkeypatch.setattr(doctor_checks, "run_ranks", broken)
    last = list(doctor_checks.run_checks(2))[-1]
    assert (last.state, last.text) == (CheckState.FAILED, "no route to host")
    assert "GLOO_SOCKET_IFNAME" in last.remedy
