import pytest

from shardwright.plan_io.files import save_plan
from tests.harness import plans


@pytest.fixture
def files(tmp_path):
    fast, _, small = plans.frontier()
    save_plan(fast, tmp_path / "fast.json")
    save_plan(small, tmp_path / "small.json")
    return tmp_path / "fast.json", tmp_path / "small.json"


def test_diff_says_what_moved_and_what_it_costs(files, shardwright_command):
    result = shardwright_command("diff", *files)
    assert result.exit_code == 0, result.exception
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "step time 80.0 ms 150 ms +70.0 ms (+87.5 %)" in lines
    assert "weight: R -> dp:S(0)" in lines
    assert "linear: dp:batch -> whole" in lines


def test_diff_json_is_one_object(files, as_json):
    found = as_json("diff", *files)
    assert found["totals"]["step_time"] == {"first": 0.08, "second": 0.15}
    assert found["first"] == str(files[0])


def test_a_file_that_is_no_plan_is_a_mistake(files, mistake, tmp_path):
    (tmp_path / "no.json").write_text("[]")
    assert "has no format number" in mistake("diff", files[0], tmp_path / "no.json")
