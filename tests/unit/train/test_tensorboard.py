"""Steps as TensorBoard's own reader finds them, and what is said where it is not installed."""

import importlib.util
import resource

import pytest

from shardwright.train import tensorboard
from shardwright.train.data.batch import JobError
from shardwright.train.loop import EvaluationRecord, StepRecord, TolerantReport
from shardwright.train.tensorboard import MetricWriter


def test_an_event_file_holds_every_step_and_evaluation(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricWriter(tmp_path) as events:
        for step in (1, 2):
            events.add(StepRecord(step, 2.0 / step, 0.5, 64, "tokens", 2**20, 3.0))
        events.add(EvaluationRecord(2, 1.5))
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    values = {
        tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    assert values == {
        "loss/training": [(1, 2.0), (2, 1.0)],
        "loss/evaluation": [(2, 1.5)],
        "step/seconds": [(1, 0.5), (2, 0.5)],
        "step/tokens per second": [(1, 128.0), (2, 128.0)],
        "memory/bytes": [(1, 2**20), (2, 2**20)],
        "gradients/norm": [(1, 3.0), (2, 3.0)],
    }


def test_a_full_disk_is_a_warning_and_no_error(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricWriter(tmp_path) as events:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            report = TolerantReport(events.add, "metrics of TensorBoard")
            for step in range(30):
                report(EvaluationRecord(step, 1.5))
            events.__exit__(None, None, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write metrics of TensorBoard" in capsys.readouterr().err


def test_without_tensorboard_one_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"pip install 'shardwright\[tensorboard\]'"):
        MetricWriter(tmp_path)
    assert importlib.util.find_spec is not tensorboard.find_spec
