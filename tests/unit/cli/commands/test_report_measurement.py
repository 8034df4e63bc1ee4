import csv
import json

import pytest

from tests.unit.cli.commands.test_run import RECORDS, launched  # noqa: F401


@pytest.fixture
def run_file(api, target, plan_file, launched, as_json, tmp_path):  # noqa: F811
    file = tmp_path / "run.json"
    file.write_text(json.dumps(as_json("run", target, plan_file, "--no-verify")))
    return file


def test_a_run_becomes_a_row_of_a_new_file_and_of_a_known_one(
    run_file, shardwright_command, tmp_path
):
    rows = tmp_path / "rows.csv"
    for model in ("MLP, wide", "MLP"):
        given = ("--model", model, "--note", "quiet")
        result = shardwright_command("report-measurement", run_file, *given, "-o", rows)
        assert result.exit_code == 0, result.exception
    with rows.open() as text:
        first, second = csv.DictReader(text)
    assert first["model"] == "MLP, wide" and second["model"] == "MLP"
    assert first["note"] == "quiet"
    assert first["predicted_step_seconds"] == "0.1"
    assert first["measured_step_seconds"] == first["fastest_step_seconds"] == "0.04"
    assert first["steps"] == str(len(RECORDS) - len(RECORDS) // 2)
    assert first["measured_peak_bytes"] == str(50 * 2**20)
    assert first["machine"] and first["torch"] and first["graph"]


def test_without_a_file_the_row_is_printed(run_file, shardwright_command):
    result = shardwright_command("report-measurement", run_file, "--model", "MLP")
    header, row = csv.reader(result.stdout.splitlines())
    assert dict(zip(header, row, strict=True))["model"] == "MLP"


def test_what_is_no_run_and_other_files_are_refused(run_file, mistake, tmp_path):
    given = ("--model", "MLP")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    line = mistake("report-measurement", run_file, *given, "-o", other)
    assert "has other columns than these rows" in line
    assert other.read_text() == "a,b\n1,2\n"
    old = {"predicted_step_seconds": 1, "measured_step_seconds": 2}
    for text, wrong in ((json.dumps(old), "does not say plan"), ("[]", "is not an output of")):
        run_file.write_text(text)
        assert wrong in mistake("report-measurement", run_file, *given)
