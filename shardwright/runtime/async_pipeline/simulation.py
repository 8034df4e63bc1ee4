"""Simulates an asynchronous pipeline in one process, with the staleness and values of real ranks.

Stages are called one after the other, each in the order of `schedule.py`. The results of a stage
depend only on that order, so the losses are bit-identical to those of real ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.ir.schedules.weight_versions import weights_named
from shardwright.program.step.instructions import Recv, Send
from shardwright.runtime.async_pipeline.stage import AsyncStage, Scheduler, StageUpdate
from shardwright.runtime.modes import WithoutDropout
from shardwright.runtime.pipeline.stage import StageModule, Stages, capture_stages

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Scheduler]
Tensors = list[torch.Tensor]


class Mailboxes:
    """The messages between stages when all are in one process, by channel."""

    def __init__(self) -> None:
        self.boxes: defaultdict[str, deque[Tensors]] = defaultdict(deque)

    def end(self, one: Send | Recv, *, ahead: bool) -> _End:
        """The end of a message; there is none to receive `ahead`."""
        return _End(one, self.boxes[one.channel])


@dataclass(frozen=True)
class _End:
    """Puts the messages of one instruction into a box, or takes them out."""

    one: Send | Recv
    box: deque[Tensors]

    def send(self, values: Sequence[torch.Tensor | None], device: torch.device) -> _Arrived:
        """Put a message into the box; None is zeros."""
        message: Tensors = []
        for value, part in zip(values, self.one.payload, strict=True):
            tensor = torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device)
            message.append(tensor if value is None else tensor.copy_(value))
        self.box.append(message)
        return _Arrived([])

    def receive(self, _device: torch.device) -> _Arrived:
        """Take the oldest message out of the box."""
        return _Arrived(self.box.popleft())


@dataclass(frozen=True)
class _Arrived:
    """A message that is there."""

    values: Tensors

    def results(self) -> Tensors:
        return self.values


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
        stages, boxes = stages.under(how), Mailboxes()
        modules = [
            StageModule(stages, k, stages.programs(k, 0), boxes, model, device, seed)
            for k in range(count)
        ]
        self.stages = [AsyncStage(m, k, count, how) for k, m in enumerate(modules)]
        self.updates = []
        self.evaluation = WithoutDropout(model, stages.captured.graph)
        for module in modules:
            steps = optimizer(module.parameters())
            schedule = scheduler(steps) if scheduler is not None else None
            self.updates.append(StageUpdate(steps, schedule, clip_norm, discount_steps))

    def train_step(self, batch: Any) -> torch.Tensor:
        """Put one mini-batch (a mapping of keywords or a tuple) into the pipeline; its loss."""
        for stage, update in zip(self.stages, self.updates, strict=True):
            loss = stage.step(update, stage.module.part_of(batch))
        assert loss is not None  # the last stage does both passes at once
        return loss

    def drain(self) -> None:
        """Finish the mini-batches in flight; then all stages have made equally many updates."""
        for stage, update in reversed(list(zip(self.stages, self.updates, strict=True))):
            stage.drain(update)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of one batch with the weights as they are, without dropout; drain first."""
        self.evaluation.check()
        runs = [stage.evaluation(stage.module.part_of(batch)) for stage in self.stages]
        for stage, run in zip(self.stages, runs, strict=True):
            stage.evaluate(run, returning=False)
        for stage, run in reversed(list(zip(self.stages, runs, strict=True))):
            loss = stage.evaluate(run, returning=True)
        assert loss is not None  # of the first stage, which the others have sent it to
        return loss

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers of all stages as the module has them; drain first."""
        return {
            key: value
            for stage in self.stages
            for key, value in stage.module.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
