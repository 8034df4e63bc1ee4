"""Profiles one step of a run with torch's profiler, as a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.runtime.parameters.peak_memory import quiet
from shardwright.train.checkpoint.state import TrainingState
from shardwright.train.data.batch import Batch, JobError
from shardwright.train.step import StepResult, Steps

NTH = 3  # the traced step; the first one is slow, and the loop measures memory in the second


def trace_file(folder: str, rank: int) -> Path:
    """The trace file of a rank."""
    return Path(folder, f"step-{rank}.json")


@final
class Traced:
    """Wraps `steps` and writes a Chrome trace of the third step that it begins to `file`.

    Raises `JobError` for asynchronous steps, which overlap, so that none can be traced alone.
    """

    def __init__(self, steps: Steps, file: Path, device: torch.device) -> None:
        if not steps.is_synchronous:
            raise JobError("steps of an asynchronous plan overlap, so none is traced alone")
        self.steps, self.file, self.device = steps, file, device
        self.lag, self.is_synchronous = steps.lag, steps.is_synchronous
        self.begun = 0

    def __call__(self, run: TrainingState, batches: Sequence[Batch]) -> list[StepResult]:
        """Begin a step on `batches`; return the results of the steps that have finished."""
        self.begun += 1
        if self.begun != NTH:
            return self.steps(run, batches)
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        mark = record_function(f"ProfilerStep#{run.step + 1}")
        with quiet(), profile(activities=activities) as profiler, mark:
            done = self.steps(run, batches)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        profiler.export_chrome_trace(str(self.file))
        return done

    def drain(self, run: TrainingState) -> list[StepResult]:
        """Finish all steps in flight and return their results."""
        return self.steps.drain(run)
