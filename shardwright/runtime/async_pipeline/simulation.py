"""Simulates an asynchronous pipeline in one process, with the staleness and values of real ranks.

Stages are called one after the other, each in the order of `schedule.py`. The results of a stage
depend only on that order, so the losses are bit-identical to those of real ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.runtime.async_pipeline.stage import AsyncStage, Scheduler, StageUpdate, Tensors
from shardwright.runtime.modes import WithoutDropout
from shardwright.runtime.pipeline.stage import StageModule, Stages, capture_stages
from shardwright.runtime.weight_versions import weights_named

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Scheduler]


class Mailbox:
    """The link between a stage and its neighbours when all are in one process."""

    def __init__(self, before: _Boundary | None, behind: _Boundary | None) -> None:
        self.before = before
        self.behind = behind

    def send_values(self, values: Tensors) -> None:
        assert self.behind is not None
        self.behind.values.append([value.contiguous() for value in values])

    def receive_values(self) -> Tensors:
        assert self.before is not None
        return self.before.values.popleft()

    def send_gradients(self, gradients: Tensors, loss: torch.Tensor) -> None:
        assert self.before is not None
        self.before.gradients.append(([g.contiguous() for g in gradients], loss))

    def receive_gradients(self) -> tuple[Tensors, torch.Tensor]:
        assert self.behind is not None
        return self.behind.gradients.popleft()


class _Boundary:
    """Messages in flight between two stages."""

    def __init__(self) -> None:
        self.values: deque[Tensors] = deque()
        self.gradients: deque[tuple[Tensors, torch.Tensor]] = deque()


def async_simulation(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int,
    weights: str,
    optimizer: MakeOptimizer,
    cuts: Sequence[int] | None = None,
    **options: Any,
) -> AsyncSimulation:
    """A simulated pipeline of `model`, captured with one call; `options` as `AsyncSimulation`'s."""
    weights_named(weights)  # raises for a wrong name before the capture, which may take long
    found = capture_stages(model, args, kwargs, stages=stages, cuts=cuts)
    return AsyncSimulation(found, model, weights, optimizer, **options)


class AsyncSimulation:
    """All stages of an asynchronous pipeline, trained step by step in this process.

    `optimizer` makes one optimizer per stage from its parameters, `scheduler` a
    learning-rate schedule for it; `clip_norm` clips each stage's gradients on
    their own; `discount_steps` as in `AsyncPipeline.train_step`. One stage is
    plain synchronous training.
    """

    def __init__(
        self,
        stages: Stages,
        model: nn.Module,
        weights: str,
        optimizer: MakeOptimizer,
        *,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        discount_steps: int = 0,
        seed: int = 0,
    ) -> None:
        how, count = weights_named(weights), len(stages.parts)
        device = next(model.parameters()).device
        modules = [StageModule(stages, k, model, device, seed) for k in range(count)]
        self.stages = [AsyncStage(m, k, count, how) for k, m in enumerate(modules)]
        self.updates = []
        self.evaluation = WithoutDropout(model, stages.captured.graph)
        for module in modules:
            steps = optimizer(module.parameters())
            schedule = scheduler(steps) if scheduler is not None else None
            self.updates.append(StageUpdate(steps, schedule, clip_norm, discount_steps))
        between = [None, *(_Boundary() for _ in range(count - 1)), None]
        self.links = [Mailbox(between[k], between[k + 1]) for k in range(count)]

    def train_step(self, batch: Any) -> torch.Tensor:
        """Put one mini-batch (a mapping of keywords or a tuple) into the pipeline; its loss."""
        for stage, update, link in zip(self.stages, self.updates, self.links, strict=True):
            loss = stage.step(update, link, stage.module.part_of(batch))
        assert loss is not None  # the last stage does both passes at once
        return loss

    def drain(self) -> None:
        """Finish the mini-batches in flight; then all stages have made equally many updates."""
        for k in reversed(range(len(self.stages))):
            self.stages[k].drain(self.updates[k], self.links[k])

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of one batch with the weights as they are, without dropout; drain first."""
        self.evaluation.check()
        values: Tensors = ()
        for stage in self.stages:
            values = stage.evaluate(values, stage.module.part_of(batch))
        return values[0]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers of all stages as the module has them; drain first."""
        return {
            key: value
            for stage in self.stages
            for key, value in stage.module.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
