"""A sample of the mutation campaign: a fault made by hand, and the tests that notice it."""

import json
import subprocess
import sys

import pytest

from benchmarks.mutants.rooms import ROOMS, modules, own_tests
from benchmarks.record import ROOT


@pytest.mark.hf  # all libraries are loaded before the tests
def test_a_planted_fault_is_noticed_by_the_tests_of_its_module(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.mutants.run", "--room", "planted", "--jobs", "1"]
    command += ["--only", "async_pipeline/prediction.py", "-o", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (row,) = json.loads(out.read_text())["mutants"]
    assert "max_exp_avg_sq" in row["name"] and row["verdict"] == "killed"
    assert row["by"].startswith("tests/unit/runtime/async_pipeline/test_prediction.py::test_")


def test_every_module_of_a_room_has_tests_of_its_own():
    for room in ROOMS:
        assert all(own_tests(module) for module in modules(room)), room
