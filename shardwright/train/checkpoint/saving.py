"""Decides when a run saves, and handles checkpoints that could not be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.reading import CheckpointError
from shardwright.train.checkpoint.state import TrainingState


@dataclass(frozen=True, slots=True)
class PeriodicSaver:
    """Saves a checkpoint every `every` steps and at the end; `failed` is called with errors.

    With `background` a checkpoint is written while steps continue; the next one waits until it is
    complete.
    """

    checkpoints: Checkpoints
    every: int
    failed: Callable[[CheckpointError], None]
    background: bool = True

    def now(self, run: TrainingState) -> None:
        """Save and wait, unless this step is saved; raises `CheckpointError` if it fails."""
        self._wait()
        if self.checkpoints.last != run.step:
            self.checkpoints.save(run)

    def is_due(self, run: TrainingState, steps: int) -> bool:
        """Whether a checkpoint is due after the last finished step of `steps`."""
        return run.step >= steps or run.step % self.every == 0

    def after_step(self, run: TrainingState, steps: int) -> None:
        """Save if a checkpoint is due.

        An error is passed to `failed`; the next checkpoint that is due is written all the same.
        After the last step it is raised as well.
        """
        if not self.is_due(run, steps):
            return
        try:
            if self.background and run.step < steps:
                self._wait()
                self.checkpoints.begin(run)
            else:
                self.now(run)
        except CheckpointError as e:
            self.failed(e)
            if run.step >= steps:
                raise

    def _wait(self) -> None:
        try:
            self.checkpoints.settle()
        except CheckpointError as e:
            self.failed(e)
