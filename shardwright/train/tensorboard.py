"""Writes metrics to event files of TensorBoard, if it is installed."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from shardwright.train.data.batch import JobError
from shardwright.train.loop import EvaluationRecord, StepRecord, warn_of_disk


def require_tensorboard() -> None:
    """Raise `JobError` if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        raise JobError("tensorboard is not installed: pip install 'shardwright[tensorboard]'")


@final
class MetricWriter:
    """Writes the records of rank 0 to an event file in `folder`, one scalar for each value."""

    def __init__(self, folder: str | Path) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._writer.close()
        except OSError as e:  # of its thread
            warn_of_disk("metrics of TensorBoard", e)

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        """Write the record of one step or evaluation."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)


def scalars(record: StepRecord | EvaluationRecord) -> dict[str, float]:
    """The scalars of a record, by name; values that are not finite are left out.

    >>> scalars(EvaluationRecord(3, 1.5))
    {'loss/evaluation': 1.5}
    """
    if isinstance(record, EvaluationRecord):
        return {"loss/evaluation": record.evaluation}
    found = {
        "loss/training": record.loss,
        "step/seconds": record.seconds,
        f"step/{record.unit} per second": record.units / record.seconds,
        "memory/bytes": float(record.bytes),
    }
    if record.gradient_norm is not None:
        found["gradients/norm"] = record.gradient_norm
    return {name: value for name, value in found.items() if math.isfinite(value)}
