import json

from shardwright.cost.step import timeline
from shardwright.ir.plan import Plan
from tests import plans


def test_a_trace_has_a_track_for_each_stream_and_the_users_names(tmp_path, shardwright_command):
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    plans.transformer().save(file)
    result = shardwright_command("simulate", file, "-o", trace)
    assert result.exit_code == 0, result.exception
    assert "of communication" in result.stdout and "perfetto" in result.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(named.values()) == ["communication", "compute"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in spans} == set(named)
    assert "blocks.2.down: linear" in {e["name"] for e in spans}
    assert "all_gather dp: embed.weight" in {e["name"] for e in spans}
    ends = max(e["ts"] + e["dur"] for e in spans)
    assert abs(ends - timeline(Plan.load(file)).seconds * 1e6) < 1e-3
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_simulate_json_has_what_is_exposed(tmp_path, as_json):
    plans.transformer().save(tmp_path / "plan.json")
    found = as_json("simulate", tmp_path / "plan.json")
    by_stream = {track["stream"]: track for track in found["tracks"]}
    serial = sum(track["busy_seconds"] for track in found["tracks"])
    assert abs(found["step_seconds"] - serial) < 1e-9
    link = by_stream["communication"]
    assert abs(link["exposed_seconds"] - link["busy_seconds"]) < 1e-9
    assert found["file"] is None


def test_a_trace_that_cannot_be_written_is_a_mistake(tmp_path, plan_file, mistake):
    line = mistake("simulate", plan_file, "-o", tmp_path / "nowhere" / "trace.json")
    assert "cannot write" in line and "choose another path" in line
