import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.report.timelines.chrome import TraceError
from shardwright.report.timelines.profiled import profiled


def span(name, start, length, pid=7, tid=7, cat="cpu_op"):
    return {"ph": "X", "name": name, "ts": start, "dur": length, "pid": pid, "tid": tid, "cat": cat}


def thread(name, pid, tid):
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def test_the_last_marked_step_is_cut_out_and_begins_at_zero():
    events = [
        thread("python", 7, 7),
        thread("stream 3", 0, 3),
        span("ProfilerStep#1", 1000, 500, cat="user_annotation"),
        span("aten::mm", 1100, 50),
        span("ProfilerStep#2", 1600, 400, cat="user_annotation"),
        span("ProfilerStep#2", 1650, 400, 0, 3, cat="gpu_user_annotation"),
        span("aten::addmm", 1620, 10),
        span("gemm", 1640, 300, 0, 3, cat="kernel"),
        span("aten::late", 2100, 10),
        span("PyTorch Profiler", 0, 9999, "Spans", "PyTorch Profiler", cat="Trace"),
    ]
    found = profiled(json.dumps({"traceEvents": events}), "measured")
    assert found.rows == ("python", "stream 3")
    assert found.seconds == pytest.approx(400e-6)
    assert found.events == (
        (0, "ProfilerStep#2", "user_annotation", 0.0, 400.0),
        (0, "aten::addmm", "cpu_op", 20.0, 10.0),
        (1, "gemm", "kernel", 40.0, 300.0),
        (1, "ProfilerStep#2", "gpu_user_annotation", 50.0, 400.0),
    )


def test_a_trace_of_torch_is_read(tmp_path):
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("ProfilerStep#5"):
        layer(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = profiled((tmp_path / "trace.json").read_text(), "measured")
    names = [name for _, name, *_ in found.events]
    assert names[0] == "ProfilerStep#5"
    assert {"aten::linear", "Optimizer.step#SGD.step"} <= set(names)
    ends = [start + length for *_, start, length in found.events]
    assert min(start for *_, start, _ in found.events) == 0
    assert max(ends) <= found.seconds * 1e6 + 1


def test_without_a_mark_all_of_it_is_the_step():
    text = json.dumps([span("a", 50, 10), span("b", 80, 20)])
    found = profiled(text, "x")
    assert found.seconds == pytest.approx(50e-6)
    assert [start for *_, start, _ in found.events] == [0, 30]


@pytest.mark.parametrize("text", ["no", "[1]", '{"a": 1}', '[{"ph": "X", "pid": 1, "name": "a"}]'])
def test_what_is_no_trace_is_refused(text):
    with pytest.raises(TraceError, match=r"step\.json is not a trace of torch\.profiler"):
        profiled(text, "step.json")


def test_an_empty_trace_is_refused():
    with pytest.raises(TraceError, match="no complete events"):
        profiled("[]", "step.json")
