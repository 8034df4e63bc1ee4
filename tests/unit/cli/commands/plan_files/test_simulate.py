import json

from shardwright.plan_io.files import load_plan, save_plan
from tests.harness import plans
from tests.unit.simulate.time.test_async_pipeline import pipeline


def test_a_trace_has_a_track_for_each_stream_and_the_users_names(tmp_path, shardwright_command):
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    save_plan(plans.timed(plans.transformer()), file)
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
    assert abs(ends - load_plan(file).timeline.seconds * 1e6) < 1e-3
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_a_measured_step_is_a_process_beside_the_simulated_one(
    tmp_path, shardwright_command, as_json
):
    file, seen, trace = (tmp_path / name for name in ("plan.json", "seen.json", "trace.json"))
    save_plan(plans.timed(plans.transformer()), file)
    spans = [("ProfilerStep#3", 500.0, 2000.0), ("aten::mm", 600.0, 80.0), ("aten::old", 0.0, 9.0)]
    place = {"ph": "X", "pid": 9, "tid": 9}
    seen.write_text(json.dumps([place | {"name": n, "ts": t, "dur": d} for n, t, d in spans]))
    result = shardwright_command("simulate", file, "-o", trace, "--measured", seen)
    assert result.exit_code == 0, result.exception
    assert "measured, seen.json: 2.00 ms" in result.stdout
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["simulated, each of 4 ranks", "measured, seen.json"]
    drawn = {name: [e for e in events if e["ph"] == "X" and e["pid"] == pid]
             for pid, name in processes.items()}  # fmt: skip
    assert len(drawn["simulated, each of 4 ranks"]) == len(load_plan(file).timeline.tasks)
    measured = [(e["name"], e["ts"], e["dur"]) for e in drawn["measured, seen.json"]]
    assert measured == [("ProfilerStep#3", 0.0, 2000.0), ("aten::mm", 100.0, 80.0)]
    found = as_json("simulate", file, "-o", trace, "--measured", seen)
    assert found["measured_step_seconds"] == [0.002]


def test_a_measured_step_that_cannot_be_shown_is_a_mistake(tmp_path, mistake):
    plan_file = tmp_path / "plan.json"
    save_plan(plans.timed(plans.simple()), plan_file)
    trace, there = tmp_path / "trace.json", tmp_path / "there.json"
    there.write_text("no")
    assert "give its path with -o" in mistake("simulate", plan_file, "--measured", there)
    asked = ("simulate", plan_file, "-o", trace, "--measured")
    assert "cannot read" in mistake(*asked, tmp_path / "gone.json")
    assert "is not a trace of torch.profiler" in mistake(*asked, there)
    assert not trace.exists()


def test_a_plan_whose_step_was_not_simulated_has_no_timeline(tmp_path, mistake):
    save_plan(plans.transformer(), tmp_path / "plan.json")
    assert "`shardwright recost TARGET plan.json`" in mistake("simulate", tmp_path / "plan.json")


def test_simulate_json_has_what_is_exposed(tmp_path, as_json):
    save_plan(plans.timed(plans.transformer()), tmp_path / "plan.json")
    found = as_json("simulate", tmp_path / "plan.json")
    by_stream = {track["stream"]: track for track in found["tracks"]}
    serial = sum(track["busy_seconds"] for track in found["tracks"])
    assert abs(found["step_seconds"] - serial) < 1e-9
    link = by_stream["communication"]
    assert abs(link["exposed_seconds"] - link["busy_seconds"]) < 1e-9
    assert found["file"] is None


def test_a_trace_that_cannot_be_written_is_a_mistake(tmp_path, mistake):
    plan_file = tmp_path / "plan.json"
    save_plan(plans.timed(plans.simple()), plan_file)
    line = mistake("simulate", plan_file, "-o", tmp_path / "nowhere" / "trace.json")
    assert "cannot write" in line and "choose another path" in line


def test_a_pipeline_has_two_tracks_for_each_stage(tmp_path, shardwright_command, as_json):
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    save_plan(pipeline()[1], file)
    result = shardwright_command("simulate", file, "-o", trace)
    assert "for 6 mini-batches from an empty pipeline on" in " ".join(result.stdout.split())
    events = json.loads(trace.read_text())["traceEvents"]
    groups = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert groups == ["simulated, stage 1, rank 0", "simulated, stage 2, rank 1"]
    assert {"update of parameters", "receive values 2", "receive gradients 3"} <= {
        e["name"] for e in events
    }
    assert as_json("simulate", file)["mini_batches"] == 6


def test_a_pipeline_whose_step_was_not_simulated_has_no_timeline(tmp_path, mistake):
    save_plan(pipeline()[0], tmp_path / "plan.json")
    assert "plan again" in mistake("simulate", tmp_path / "plan.json")
