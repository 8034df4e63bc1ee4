"""The calls of one stage of an asynchronous pipeline.

The simulation and the ranks run this code; they differ only in the ends of their messages. Each
call plays the stage's program, or the half of it before or behind the seed while the pipeline fills
or drains, and the next one goes on with what it has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from shardwright.ir.schedules.weight_versions import Weights, lag
from shardwright.program.step.async_pipeline.versions import Version
from shardwright.program.step.instructions import Recv, Seed, Send, Update
from shardwright.runtime.async_pipeline.pipemare_lr import discount, scaled
from shardwright.runtime.async_pipeline.prediction import PREDICTORS, check, predict
from shardwright.runtime.async_pipeline.schedule import StagePasses, call_at, remaining
from shardwright.runtime.executor.carried_state import Left
from shardwright.runtime.executor.executor import ProgramRun
from shardwright.runtime.parameters.dtensor_spec import local
from shardwright.runtime.pipeline.stage import StageModule

_NOTHING = Left({}, {}, {})


class Scheduler(Protocol):
    """A learning-rate schedule: any of `torch.optim.lr_scheduler`."""

    def step(self) -> Any: ...


@dataclass(frozen=True)
class StageUpdate:
    """The update that follows each backward pass of a stage.

    Learning rates of late stages are smaller for the first `discount_steps` updates.
    """

    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None = None
    clip_norm: float | None = None
    discount_steps: int = 0
    check: Callable[[torch.Tensor], None] | None = None  # of the last stage's losses, may raise


class _Update(NamedTuple):
    """One update, with learning rates times `factor`."""

    how: StageUpdate
    parameters: Sequence[nn.Parameter]
    factor: float

    def step(self) -> None:
        """Clip gradients, and update."""
        if self.how.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.how.clip_norm)
        with scaled(self.how.optimizer, self.factor):
            self.how.optimizer.step()


class AsyncStage:
    """Stage `index` of `stages`: forward and backward passes in the continuous order."""

    def __init__(self, module: StageModule, index: int, stages: int, weights: Weights) -> None:
        self.module = module
        self.index, self.stages = index, stages
        self.weights = weights
        self.left = _NOTHING  # what the last call has left
        self.states: deque[torch.Tensor] = deque()  # random states of mini-batches in flight
        self.seen = 0  # mini-batches whose forward pass is done
        self.start = 0  # the first one since the pipeline was empty
        instructions = module.step.program.instructions
        self.seed = next(i for i, one in enumerate(instructions) if isinstance(one, Seed)) + 1
        updates = [one for one in instructions if isinstance(one, Update)]
        self.late = updates[0].late if updates else lag(index, stages)

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def step(self, update: StageUpdate, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Take mini-batch `seen`; the loss of the one whose backward pass was done, if any."""
        return self.run(call_at(self.seen, self.index, self.stages, self.start), update, batch)

    def drain(self, update: StageUpdate) -> list[torch.Tensor]:
        """The backward passes that are left; their losses."""
        left = remaining(self.index, self.stages, self.start, self.seen)
        losses = [self.run(call, update, {}) for call in left]
        self.start = self.seen
        self.left = _NOTHING  # the last message, which the channel waits for at its end
        return [loss for loss in losses if loss is not None]

    def run(
        self, call: StagePasses, update: StageUpdate, batch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """One call of the schedule."""
        if call.forward is not None and self.weights.method:
            check(update.optimizer)
        factor = self._factor(update.discount_steps)
        executor = self.module.step.training_step
        run = executor.begin(self.module.given(), self.module.random_tensor())
        run.take_over(self.left)
        run.make_versions = lambda one: self._versions(update.optimizer, one)
        loss = None
        with scaled(update.optimizer, factor):  # because predictions use the learning rate
            if call.forward is not None:
                self._forward(run, batch, update)
            if call.backward is not None:
                loss = self._backward(run, executor.end)
        self.left = run.leave()
        if call.backward is not None:
            self.module.take_gradients(run.results())
            run.finish(_Update(update, self.module.trained(), factor))
            if update.scheduler is not None:  # also of a stage that updates nothing
                update.scheduler.step()
        return loss

    def _forward(
        self, run: ProgramRun, batch: Mapping[str, torch.Tensor], update: StageUpdate
    ) -> None:
        """The half of the program before the seed."""
        module = self.module
        run.values.update(module.inputs(module.step.program, batch))
        self.states.append(run.state)
        run.play(self.seed)
        module.finish_forward(run.values)
        self.seen += 1
        if self.is_last and update.check is not None:
            update.check(run.tensor(module.step.program.outputs[0]))

    def _backward(self, run: ProgramRun, end: int) -> torch.Tensor:
        """The half behind the seed, up to the update: the loss of its mini-batch."""
        for parameter in self.module.trained():
            parameter.grad = None
        run.state, run.position = self.states.popleft(), self.seed
        run.play(end)
        # A copy, as a received loss is a part of its message.
        return run.tensor(self.module.step.program.outputs[0]).clone()

    def evaluation(self, batch: Mapping[str, torch.Tensor]) -> ProgramRun:
        """An evaluation of a batch with the current weights, before its first instruction."""
        step = self.module.step
        values = self.module.given() | self.module.inputs(step.evaluation.program, batch)
        return step.evaluation.begin(values, self.module.random_tensor())

    def evaluate(self, run: ProgramRun, *, returning: bool) -> torch.Tensor | None:
        """Play an evaluation up to the loss's way back, or from there; its loss, if it is known."""
        program = run.executor.program
        count = len(program.instructions)
        back = (
            i
            for i, one in enumerate(program.instructions)
            if isinstance(one, Send | Recv) and one.backward
        )
        was = self.module.training
        self.module.eval()
        try:
            run.play(count if returning else next(back, count))
        finally:
            self.module.train(was)
        return run.values.get(program.outputs[0])

    def _factor(self, discount_steps: int) -> float:
        """The factor of the learning rates for the next update."""
        if not discount_steps:
            return 1.0
        made = self.module.minibatches - len(self.states)  # those before a resume too
        return discount(self.late, made, discount_steps)

    def _versions(self, optimizer: torch.optim.Optimizer, one: Version) -> list[torch.Tensor]:
        """The versions of this device's tiles that an instruction makes."""
        leaves = [self.module.stored(leaf) for leaf, _ in one.parameters]
        if one.method:
            return predict(optimizer, leaves, one.updates, PREDICTORS[one.method])
        return [local(leaf).detach().clone() for leaf in leaves]
