"""One optimizer step of a job: accumulation, clipping, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwright.runtime.parameters.clipping import Clipping, scale
from shardwright.train.checkpoint.state import Steppable, TrainingState
from shardwright.train.data.batch import Batch, JobError

_IGNORED = -100  # the label that torch's losses ignore by default


class NonFiniteLossError(ArithmeticError):
    """A loss or a norm of gradients that is not finite."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of step `step`: the loss before its update, and the gradients' norm.

    The norm is that before clipping; None: it was not computed.
    """

    loss: float
    gradient_norm: float | None
    step: int


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


@dataclass(frozen=True)
class Stepper:
    """Makes the optimizer steps of one run; every rank makes them at the same time.

    `stepper(run, batches)` makes one step over all `batches` and returns a list of its result.

    Attributes:
        module: the parallel module, which computes the loss.
        clipping: computes the norm of all gradients over all ranks; None: no norm is computed.
        clip_norm: the largest norm of all gradients together.
        tokens: the weight of a batch among the batches of a step; None: equal weights.
        lag: steps in flight beside the current one, always 0.
        is_synchronous: whether a step is finished when the call returns, always True.
    """

    module: Steppable
    clipping: Clipping | None = None
    clip_norm: float = math.inf
    tokens: Callable[[Batch], float] | None = None
    lag: int = 0
    is_synchronous: bool = True

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
        return cls(module, Clipping(dict(module.named_parameters())), clip_norm, tokens)

    def __call__(self, run: TrainingState, batches: Sequence[Batch]) -> list[StepResult]:
        """Make one step; raise `NonFiniteLossError` or `JobError` before the weights change."""
        run.optimizer.zero_grad(set_to_none=True)
        loss = accumulate(self.module, batches, weights(batches, self.tokens), run.step + 1)
        norm = self.clipping.clip(self.clip_norm).item() if self.clipping is not None else None
        if norm is not None and not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the gradients of step {run.step + 1} have the norm {norm}, its loss is {loss};"
                " the weights are those before it"
            )
        run.optimizer.step()
        if run.schedule is not None:
            run.schedule.step()
        run.step += 1
        return [StepResult(loss, norm, run.step)]

    def drain(self, run: TrainingState) -> list[StepResult]:
        """Return no results, because no step is in flight between two calls."""
        return []


def accumulate(
    module: Steppable, batches: Sequence[Batch], weight: Sequence[float], step: int = 1
) -> float:
    """The weighted mean loss of `batches`, whose gradients are accumulated in the parameters.

    The parameters must have no gradients before. Batches of weight 0 are skipped. Gradients are
    rescaled in place between batches of different weights, so that no copy of them is needed.

    Args:
        module: the parallel module.
        batches: the global batches.
        weight: the weight of each batch; their sum is positive.
        step: the number of the step, for the error.

    Raises:
        NonFiniteLossError: a loss is not finite; the error names the step and the first operator
            with a result that is not finite.
    """
    total, sum_of_losses, before = sum(weight), 0.0, 0.0
    for batch, counts in zip(batches, weight, strict=True):
        if counts == 0:
            continue
        if before and before != counts:
            scale(module.parameters(), before / counts)
        state = module.random_state()
        loss = module.forward_backward(batch).item()
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss of step {step} is {loss}; first to make NaN or infinity is"
                f" {module.origin_of_nonfinite(batch, state)}. The weights are those before it"
            )
        sum_of_losses += counts * loss
        before = counts
    if before != total:
        scale(module.parameters(), before / total)
    return sum_of_losses / total


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
