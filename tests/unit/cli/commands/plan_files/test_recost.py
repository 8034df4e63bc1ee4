"""`shardwright recost` on a plan file that was edited."""

import json
from pathlib import Path

TARGET = f"{Path(__file__).parents[5] / 'examples' / 'mlp.py'}:job"
MACHINE = ("--machine", "4xcpu")


def test_an_edited_file_is_checked_costed_and_written(
    as_json, shardwright_command, mistake, tmp_path
):
    file, costed = tmp_path / "plan.json", tmp_path / "costed.json"
    plan = as_json("plan", TARGET, *MACHINE, "-o", file)
    same = as_json("recost", TARGET, file, *MACHINE)
    assert same["step_seconds"] == plan["step_seconds"]
    assert same["peak_bytes"] == plan["peak_bytes"]

    data = json.loads(file.read_text())
    (row,) = (row for row in data["parameters"] if row[0] == "hidden.weight")
    axis = data["mesh"].partition("=")[0]
    row[1] = f"{axis}:S(0)"
    file.write_text(json.dumps(data))
    text = shardwright_command("recost", TARGET, file, *MACHINE, "-o", costed).stdout
    assert "costed: " in text and "the fastest plan that is found takes" in text
    assert f"wrote {costed}" in text
    new = as_json("explain", costed)
    assert new["step_seconds"] != plan["step_seconds"]
    assert as_json("recost", TARGET, costed, *MACHINE)["step_seconds"] == new["step_seconds"]

    row[1] = f"{axis}:S(7)"
    file.write_text(json.dumps(data))
    assert "hidden.weight" in mistake("recost", TARGET, file, *MACHINE, "-o", costed)
    assert as_json("explain", costed) == new, "what was there is left alone"


def test_a_plan_for_other_devices_is_refused(as_json, mistake, tmp_path):
    file = tmp_path / "plan.json"
    as_json("plan", TARGET, *MACHINE, "-o", file)
    line = mistake("recost", TARGET, file, "--machine", "2xcpu")
    assert "the plan is for 4 devices, 2xcpu has 2" in line
