"""The work of one stage of an asynchronous pipeline.

The simulation and the ranks run this code; they differ only in their `NeighbourLink`. Weights are
not kept for the backward pass unless they are stashed: where autograd would save a weight, it saves
the weight's index, and the backward pass reads the weights of the version that it should use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shardwright.runtime.async_pipeline.pipemare_lr import discount, scaled
from shardwright.runtime.async_pipeline.prediction import check, predict
from shardwright.runtime.async_pipeline.schedule import StagePasses, call_at, lag, remaining
from shardwright.runtime.pipeline.stage import StageModule
from shardwright.runtime.weight_versions import Weights

Tensors = Sequence[torch.Tensor]


class NeighbourLink(Protocol):
    """The way to a stage's neighbours; messages in each direction arrive in the order sent.

    Gradients travel with the loss of their mini-batch, so that every stage knows it.
    """

    def send_values(self, values: Tensors) -> None: ...

    def receive_values(self) -> Tensors: ...

    def send_gradients(self, gradients: Tensors, loss: torch.Tensor) -> None: ...

    def receive_gradients(self) -> tuple[Tensors, torch.Tensor]: ...


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

    def __call__(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Clip gradients, update with learning rates times `factor`, and step the schedule."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        with scaled(self.optimizer, factor):
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


@dataclass
class _InFlight:
    """State that a mini-batch keeps on a stage between its two passes.

    `roots` are the autograd nodes that will receive gradients; sent values are not kept.
    """

    received: Tensors
    roots: Sequence[GradientEdge]


class _InPlaceOf(torch.autograd.Function):
    """Returns `weight`, and passes its gradient to `parameter`. Neither is kept."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class AsyncStage:
    """Stage `index` of `stages`: forward and backward passes in the continuous order."""

    def __init__(self, module: StageModule, index: int, stages: int, weights: Weights) -> None:
        self.module = module
        self.index = index
        self.stages = stages
        self.weights = weights
        self.horizon = weights.horizon(index, stages)
        # No update comes between the two passes of the last stage.
        self.keeps_weights = weights.stashes or lag(index, stages) == 0
        self.flying: deque[_InFlight] = deque()
        self.seen = 0  # mini-batches whose forward pass is done
        self.start = 0  # the first one since the pipeline was empty

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def step(
        self, update: StageUpdate, link: NeighbourLink, batch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Take mini-batch `seen`; the loss of the one whose backward pass was done, if any."""
        return self.run(
            call_at(self.seen, self.index, self.stages, self.start), update, link, batch
        )

    def drain(self, update: StageUpdate, link: NeighbourLink) -> list[torch.Tensor]:
        """The backward passes that are left; their losses."""
        left = remaining(self.index, self.stages, self.start, self.seen)
        losses = [self.run(call, update, link, {}) for call in left]
        self.start = self.seen
        return [loss for loss in losses if loss is not None]

    def run(
        self,
        call: StagePasses,
        update: StageUpdate,
        link: NeighbourLink,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor | None:
        """One call of the schedule."""
        factor = self._factor(update.discount_steps)
        if call.forward is not None:
            received = link.receive_values() if self.index else ()
            with scaled(update.optimizer, factor):  # because predictions use the learning rate
                values = self.forward(update.optimizer, received, batch)
            self.seen += 1
            if self.is_last:
                (loss,) = values
                if update.check is not None:
                    update.check(loss)
            else:
                link.send_values(values)
        if call.backward is None:
            return None
        if self.is_last:
            gradients: Tensors = (torch.ones_like(loss),)
        else:
            gradients, loss = link.receive_gradients()
        with scaled(update.optimizer, factor):
            back = self.backward(update.optimizer, gradients)
        if self.index:
            link.send_gradients(back, loss)  # before the update: the stage before waits for it
        update(self.module.trained(), factor)
        return loss

    def forward(
        self, optimizer: torch.optim.Optimizer, received: Tensors, batch: Mapping[str, torch.Tensor]
    ) -> Tensors:
        """The forward pass of one mini-batch: the values for the next stage."""
        if self.weights.predictor is not None:
            check(optimizer)
        stage = self.module.stage
        with_gradient = set(stage.returning_gradient(stage.received))
        taken = [
            value.detach().requires_grad_(name in with_gradient)
            for name, value in zip(stage.received, received, strict=True)
        ]
        weights, swap = self._weights(optimizer, self.horizon.forward), self.module.swap
        ours = {weight.untyped_storage().data_ptr() for weight in weights}
        swap.track(() if self.keeps_weights else weights)
        used: list[torch.Tensor] = [
            _InPlaceOf.apply(tile, weight)  # type: ignore[no-untyped-call]
            for tile, weight in zip(self.module.tiles(), weights, strict=True)
        ]
        if self.keeps_weights:
            outputs = self.module.run(used, taken, batch)
        else:
            with saved_tensors_hooks(swap.pack, swap.unpack):
                outputs = self.module.run(used, taken, batch)
        named = dict(zip(stage.graph.outputs, outputs, strict=True))
        roots = [get_gradient_edge(named[n]) for n in stage.returning_gradient(named)]
        self.flying.append(_InFlight(taken, roots))
        # A weight that is sent to the next stage must not change before it arrives.
        return [
            out.detach().clone() if out.untyped_storage().data_ptr() in ours else out.detach()
            for out in outputs
        ]

    def backward(self, optimizer: torch.optim.Optimizer, gradients: Tensors) -> Tensors:
        """The backward pass of the oldest mini-batch in flight: gradients for the stage before.

        Leaves the gradients of the stage's parameters in their `grad`.
        """
        done = self.flying.popleft()
        taken = [value for value in done.received if value.requires_grad]
        tiles = self.module.tiles()
        for tile in tiles:
            tile.grad = None
        leaves = [*tiles, *taken]
        if not self.keeps_weights:
            self.module.swap.due = self._weights(optimizer, self.horizon.backward)
        if done.roots and leaves:
            torch.autograd.backward(done.roots, gradients, inputs=leaves)
        self.module.swap.due = ()
        self.module.collect_gradients()
        return [v.grad if v.grad is not None else torch.zeros_like(v) for v in taken]

    def evaluate(self, received: Tensors, batch: Mapping[str, torch.Tensor]) -> Tensors:
        """A forward pass with the current weights, without dropout; nothing is saved."""
        was = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                weights = [tile.detach() for tile in self.module.tiles()]
                return self.module.run(weights, received, batch)
        finally:
            self.module.train(was)

    def _factor(self, discount_steps: int) -> float:
        """The factor of the learning rates for the next update."""
        if not discount_steps:
            return 1.0
        made = self.module.minibatches - len(self.flying)  # those before a resume too
        return discount(lag(self.index, self.stages), made, discount_steps)

    def _weights(self, optimizer: torch.optim.Optimizer, updates: int) -> list[torch.Tensor]:
        if self.weights.predictor is not None:
            return predict(optimizer, self.module.trained(), updates, self.weights.predictor)
        if self.weights.stashes and not self.is_last:
            return [tile.detach().clone() for tile in self.module.tiles()]
        return [tile.detach() for tile in self.module.tiles()]
