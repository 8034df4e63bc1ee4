"""The training loop of an asynchronous pipeline.

A step finishes a few steps after it began, at a different time on each stage. The pipeline is
drained before weights are read, i.e. before a checkpoint, an evaluation and at the end; then all
stages have made the same number of updates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from shardwright.ir.plan import Plan, PlanError
from shardwright.runtime.async_pipeline.runner import AsyncPipeline
from shardwright.runtime.plan_transfer import Shapes
from shardwright.runtime.sharded_ops.experts import Skew, skews
from shardwright.train.checkpoint.state import TrainingState
from shardwright.train.data.batch import Batch, JobError
from shardwright.train.job import Job
from shardwright.train.step import NonFiniteLossError, StepResult


@final
class AsyncTrainable:
    """An asynchronous pipeline as a `Trainable`.

    Raises `PlanError` for a job with `others`, calls of further shapes.
    """

    def __init__(self, pipeline: AsyncPipeline, plan: Plan, others: Sequence[Any]) -> None:
        if others:
            raise PlanError(
                "an asynchronous pipeline takes batches of the planned shape only; drop the last"
                " batch, leave Job.shapes out, or choose a plan without --async"
            )
        self.pipeline = pipeline
        self.known: tuple[Shapes, ...] = (tuple((spec.key, spec.shape) for spec in plan.inputs),)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipeline.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.pipeline.named_parameters()

    def lasting_buffers(self) -> Mapping[str, torch.Tensor]:
        return self.pipeline.lasting_buffers()

    def random_state(self) -> tuple[int, int]:
        return self.pipeline.random_state()

    def set_random_state(self, state: tuple[int, int]) -> None:
        self.pipeline.set_random_state(state)

    def skews(self) -> list[Skew]:
        """The imbalance of the routing of rows to experts."""
        return skews([self.pipeline])

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch, without dropout, on every rank; the pipeline is drained."""
        return self.pipeline.evaluate(batch)

    def local_batch(self, batch: Any) -> Any:
        """The batch itself: every rank passes the global batch, of which a stage takes its part."""
        return batch

    def check_evaluation(self) -> None:
        """Raise `PlanError` if the model cannot be evaluated with the graph of its training."""
        self.pipeline.check_evaluation()

    def train(self, mode: bool = True) -> AsyncTrainable:
        self.pipeline.train(mode)
        return self


@final
class AsyncLoop:
    """Makes the steps of a run with an `AsyncTrainable`; raises `JobError` for unsupported jobs."""

    is_synchronous = False

    def __init__(self, module: AsyncTrainable, job: Job) -> None:
        if job.accumulate != 1:
            raise JobError(
                f"Job.accumulate is {job.accumulate}, and stages of an asynchronous pipeline make"
                " an update after every mini-batch; leave it out, or choose a plan without --async"
            )
        self.module = module
        self.clip_norm, self.discount_steps = job.clip_norm, job.discount_steps
        self.lag = module.pipeline.lag  # steps after which this stage returns a loss
        self.under_way: deque[int] = deque()

    def __call__(self, run: TrainingState, batches: Sequence[Batch]) -> list[StepResult]:
        """Begin a step; return the result of the step that this stage has finished, if any.

        Raises `NonFiniteLossError` on the last stage for a loss that is not finite, which ends the
        other ranks with `StageFailed`. Stages may have updated their weights since the last
        checkpoint.
        """
        (batch,) = batches
        number = run.step + 1
        self.under_way.append(number)

        def check(loss: torch.Tensor) -> None:
            if not math.isfinite(value := loss.item()):
                raise NonFiniteLossError(
                    f"the loss of step {number} is {value}; go on from the last checkpoint with a"
                    " smaller learning rate, or clip gradients"
                )

        loss = self.module.pipeline.train_step(
            run.optimizer,
            batch,
            scheduler=run.schedule,
            clip_norm=self.clip_norm,
            discount_steps=self.discount_steps,
            check=check,
        )
        run.step = number
        return [] if len(self.under_way) <= self.lag else [self._finished(loss)]

    def drain(self, run: TrainingState) -> list[StepResult]:
        """Finish all steps in flight and return their results."""
        losses = self.module.pipeline.drain(
            run.optimizer,
            scheduler=run.schedule,
            clip_norm=self.clip_norm,
            discount_steps=self.discount_steps,
        )
        return [self._finished(loss) for loss in losses]

    def _finished(self, loss: torch.Tensor) -> StepResult:
        return StepResult(loss.item(), None, self.under_way.popleft())
