from dataclasses import replace

from shardwright.plan_io.files import save_plan
from tests.harness import plans


def planned(tmp_path):
    plan = plans.simple()
    file = tmp_path / "plan.json"
    save_plan(replace(plan, ops=tuple(replace(op, reads=("args.0",)) for op in plan.ops)), file)
    return file


def test_export_writes_to_stdout_or_a_file(tmp_path, shardwright_command):
    result = shardwright_command("export", planned(tmp_path), "--to", "parallelize_module")
    assert result.exit_code == 0, result.exception
    scope = {}
    exec(result.stdout, scope)
    assert scope["data_axes"] == {"dp": "replicate"}
    out = tmp_path / "out.py"
    again = shardwright_command(
        "export", planned(tmp_path), "--to", "parallelize_module", "-o", out
    )
    assert again.stdout == f"wrote {out}\n"
    assert out.read_text() == result.stdout


def test_json_holds_the_text(tmp_path, as_json):
    found = as_json("export", planned(tmp_path), "--to", "torchtitan")
    assert "data_parallel_replicate_degree = 2" in found["text"]


def test_what_cannot_be_said_is_one_line_and_no_file(tmp_path, mistake):
    out = tmp_path / "spec.json"
    line = mistake("export", planned(tmp_path), "--to", "split-spec", "-o", out)
    assert "not expressible, because the plan has one stage" in line
    assert not out.exists()


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path, mistake):
    out = tmp_path / "no" / "plan.py"
    line = mistake("export", planned(tmp_path), "--to", "torchtitan", "-o", out)
    assert "choose another path" in line
