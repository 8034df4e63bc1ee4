"""One optimizer step of a job: accumulation, clipping, update.

The host reads losses and norms without waiting for a device to finish the step: a loss once its
forward pass is done, before the update is issued, and on a device that runs on its own the norm of
the gradients in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.amp import GradScaler

from shardwright.runtime.device import HostScalar
from shardwright.runtime.parameters.clipping import Clipping, scale
from shardwright.runtime.parameters.loss_scaling import unscale
from shardwright.train.checkpoint.state import Steppable, TrainingState
from shardwright.train.data.batch import Batch, JobError

_IGNORED = -100  # the label that torch's losses ignore by default


class NonFiniteLossError(ArithmeticError):
    """A loss or a norm of gradients that is not finite."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of step `step`: the loss before its update, and the gradients' norm.

    The norm is that before clipping; None: it was not computed. The update was `skipped` if a
    gradient of the scaled loss was not finite.
    """

    loss: float
    gradient_norm: float | None
    step: int
    skipped: bool = False


class Steps(Protocol):
    """Makes the steps of a run, of which at most `lag` + 1 are in flight at once."""

    @property
    def lag(self) -> int: ...

    @property
    def is_synchronous(self) -> bool:
        """Whether a step is complete when it returns."""

    def __call__(self, run: TrainingState, batches: Sequence[Batch]) -> list[StepResult]:
        """Begin a step on `batches`; return the results of the steps that have finished."""

    def drain(self, run: TrainingState) -> list[StepResult]:
        """Finish all steps in flight and return their results."""


@dataclass(frozen=True, slots=True)
class _Issued:
    """A step whose norm is still to be read; it may be infinite if the loss was `scaled`."""

    loss: float
    norm: HostScalar
    step: int
    scaled: bool
    skipped: bool = False

    def result(self, weights: str) -> StepResult:
        """The result; raises `NonFiniteLossError`, which says what the `weights` are."""
        norm = self.norm.value()
        if not self.scaled and not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradients of step {self.step} have the norm {norm}, its loss is {self.loss};"
                f" {weights}"
            )
        return StepResult(self.loss, norm, self.step, self.skipped)


@dataclass
class Stepper:
    """Makes the optimizer steps of one run; every rank makes them at the same time.

    `stepper(run, batches)` makes one step over all `batches` and returns results in a list.

    Attributes:
        module: the parallel module, which computes the loss.
        clipping: computes the norm of all gradients over all ranks; None: no norm is computed.
        clip_norm: the largest norm of all gradients together.
        tokens: the weight of a batch among the batches of a step; None: equal weights.
        lag: steps in flight beside the current one: 1 if norms are read in the next step.
        is_synchronous: whether a step is issued as a whole when the call returns, always True.
        unread: the last step, if its norm is still to be read.
    """

    module: Steppable
    clipping: Clipping | None = None
    clip_norm: float = math.inf
    tokens: Callable[[Batch], float] | None = None
    lag: int = 0
    is_synchronous: bool = True
    unread: _Issued | None = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        module: Steppable,
        clip_norm: float | None,
        tokens: Callable[[Batch], float] | None = None,
    ) -> Stepper:
        """Make a stepper for `module`; every rank calls it at the same time.

        Args:
            module: a module of `parallelize`, or a `ShapeVariants`.
            clip_norm: the largest norm of all gradients together; None: they are not clipped.
            tokens: the weight of a batch among the batches of a step; None: equal weights.
        """
        if clip_norm is None:
            return cls(module, tokens=tokens)
        clipping = Clipping(dict(module.named_parameters()))
        return cls(module, clipping, clip_norm, tokens, lag=int(clipping.device.type != "cpu"))

    def __call__(self, run: TrainingState, batches: Sequence[Batch]) -> list[StepResult]:
        """Make one step, and return those whose results are known.

        Raises `JobError` or `NonFiniteLossError` for this step before the weights change. With a
        `lag` it raises the latter for the norm of the step before, whose update has been made.
        """
        run.optimizer.zero_grad(set_to_none=True)
        losses = accumulate(self.module, batches, weights(batches, self.tokens), run.scaler)
        if run.scaler is not None:
            unscale(run.optimizer, run.scaler)
        norm = None if self.clipping is None else HostScalar(self.clipping.clip(self.clip_norm))
        done = self.drain(run)  # first: what is not finite in one step is not in the next one
        loss = losses.mean(self.module, run.step + 1)
        issued, result = None, None
        if norm is None:
            result = StepResult(loss, None, run.step + 1)
        else:
            issued = _Issued(loss, norm, run.step + 1, scaled=run.scaler is not None)
            if not self.lag:
                result = issued.result("the weights are those before it")
        skipped = updated(run.optimizer, run.scaler)
        if run.schedule is not None and not skipped:
            run.schedule.step()
        run.step += 1
        if result is not None:
            done.append(replace(result, skipped=skipped))
        elif issued is not None:
            self.unread = replace(issued, skipped=skipped)
        return done

    def drain(self, run: TrainingState) -> list[StepResult]:
        """Return the result of the step that was issued last, if it is still to be read."""
        issued, self.unread = self.unread, None
        if issued is None:
            return []
        return [issued.result("the weights have its update: go on from the last checkpoint")]


@dataclass(frozen=True, slots=True)
class _Loss:
    """The loss of a batch, and what finds the origin if it is not finite."""

    value: HostScalar
    batch: Batch
    state: torch.Tensor

    @staticmethod
    def of(module: Steppable, batch: Batch, scaler: GradScaler | None) -> _Loss:
        """Add the gradients of a batch; its loss is copied to the host as soon as it is known."""
        state = module.random_tensor()
        found: list[HostScalar] = []
        module.forward_backward(batch, lambda loss: found.append(HostScalar(loss)), scaler)
        return _Loss(found[0], batch, state)

    def checked(self, module: Steppable, step: int) -> float:
        """The loss; raises `NonFiniteLossError`."""
        loss = self.value.value()
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss of step {step} is {loss}; first to make NaN or infinity is"
                f" {module.origin_of_nonfinite(self.batch, self.state)}. The weights are those"
                " before it"
            )
        return loss


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of the batches of a step, each with its weight, of which the sum is `total`."""

    weighted: tuple[tuple[float, _Loss], ...]
    total: float

    def mean(self, module: Steppable, step: int) -> float:
        """The weighted mean. Waits for the forward passes, not for what was issued after them.

        Raises `NonFiniteLossError` if a loss is not finite; the error names the step and the first
        operator with a result that is not finite.
        """
        return (
            sum(counts * loss.checked(module, step) for counts, loss in self.weighted) / self.total
        )


def updated(optimizer: torch.optim.Optimizer, scaler: GradScaler | None) -> bool:
    """Update the parameters, if gradients of a scaled loss are finite; whether that was skipped."""
    if scaler is None:
        optimizer.step()
        return False
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < scale


def accumulate(
    module: Steppable,
    batches: Sequence[Batch],
    weight: Sequence[float],
    scaler: GradScaler | None = None,
) -> Losses:
    """Accumulate the gradients of the weighted mean loss of `batches` in the parameters.

    The parameters must have no gradients before. Batches of weight 0 are skipped. Gradients are
    rescaled in place between batches of different weights, so that no copy of them is needed.

    Args:
        module: the parallel module.
        batches: the global batches.
        weight: the weight of each batch; their sum is positive.
        scaler: scales the losses of which gradients are computed.
    """
    total, before = sum(weight), 0.0
    losses: list[tuple[float, _Loss]] = []
    for batch, counts in zip(batches, weight, strict=True):
        if counts == 0:
            continue
        if before and before != counts:
            scale(module.parameters(), before / counts)
        losses.append((counts, _Loss.of(module, batch, scaler)))
        before = counts
    if before != total:
        scale(module.parameters(), before / total)
    return Losses(tuple(losses), total)


def weights(batches: Sequence[Batch], tokens: Callable[[Batch], float] | None) -> list[float]:
    """The weight of each batch; 1 without `tokens`, and for a single batch.

    Raises `JobError` without `tokens` if the batches have different numbers of labels that the loss
    ignores, and with `tokens` if a weight is negative, all are 0, or their sum is not finite.
    """
    if len(batches) == 1:
        return [1.0]
    if tokens is None:
        left_out = {_left_out(batch) for batch in batches}
        if len(left_out) > 1:
            raise JobError(
                "Job.accumulate adds up batches with different numbers of labels that are"
                f" {_IGNORED}, so they do not count alike; give Job.tokens, how many labels of a"
                " batch count, as tokens=lambda batch: (batch['labels'] != -100).sum()"
            )
        return [1.0] * len(batches)
    found = [float(tokens(batch)) for batch in batches]
    if min(found) < 0 or not sum(found) > 0 or not math.isfinite(sum(found)):
        raise JobError(f"Job.tokens counts {found} for the batches of a step; some must count")
    return found


def _left_out(batch: Batch) -> int:
    values: Iterable[Any] = batch.values() if isinstance(batch, Mapping) else batch
    is_synchronous = (v for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.int64)
    return sum(int((v == _IGNORED).sum()) for v in is_synchronous)
