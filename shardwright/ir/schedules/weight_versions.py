"""The weight versions that the two passes of a mini-batch see in an asynchronous pipeline.

Between its two passes stage k of N updates its weights `lag` = N - k - 1 times. A rule says which
weights each pass reads: the current ones, predicted ones, or a copy that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class WeightsError(ValueError):
    """The name of a rule for weight versions that does not exist."""


@dataclass(frozen=True, slots=True)
class Horizon:
    """The number of updates of its stage by which each of the two passes predicts weights."""

    forward: int
    backward: int


def lag(stage: int, stages: int) -> int:
    """Updates that a stage makes between the two passes of a mini-batch: N - k - 1."""
    return stages - stage - 1


def spectrain_horizon(stage: int, stages: int) -> Horizon:
    """SpecTrain (arXiv 1809.02839): to the end of the mini-batch's round trip at stage 0.

    The backward pass predicts ⌊k/2⌋ updates, the number of complete rounds (a forward and a
    backward pass) in the k ticks until its gradient reaches stage 0. The forward pass predicts
    `lag` more.

    >>> [(h.forward, h.backward) for h in (spectrain_horizon(k, 4) for k in range(4))]
    [(3, 0), (2, 0), (2, 1), (1, 1)]
    """
    return Horizon(stage // 2 + lag(stage, stages), stage // 2)


def pipeoptim_horizon(stage: int, stages: int) -> Horizon:
    """PipeOptim (arXiv 2312.00839): the forward pass predicts the weights of the backward pass."""
    return Horizon(lag(stage, stages), 0)


def _now(stage: int, stages: int) -> Horizon:
    return Horizon(0, 0)


@dataclass(frozen=True, slots=True)
class Weights:
    """A rule that chooses the weight versions of the two passes.

    Attributes:
        name: in the names of schedules.
        horizon: given the stage and their number, the updates by which each pass predicts weights.
        method: how weights are predicted, `"linear"` or `"decayed"`; empty if they are not.
        stashes: whether the backward pass uses the weights of the forward pass, instead of the
            current ones.
    """

    name: str
    horizon: Callable[[int, int], Horizon]
    method: str = ""
    stashes: bool = False

    def keeps(self, stage: int, stages: int) -> bool:
        """Whether both passes of a mini-batch read one version, as those of the last stage do."""
        return self.stashes or lag(stage, stages) == 0


WEIGHTS = {
    weights.name: weights
    for weights in (
        Weights("spectrain", spectrain_horizon, "linear"),
        Weights("pipeoptim", pipeoptim_horizon, "linear"),
        Weights("spectrain-decay", spectrain_horizon, "decayed"),
        Weights("pipeoptim-decay", pipeoptim_horizon, "decayed"),
        Weights("stash", _now, stashes=True),
        Weights("stale", _now),
    )
}


def weights_named(name: str) -> Weights:
    """The rule called `name`; raises `WeightsError` that lists all names if it is unknown."""
    if name not in WEIGHTS:
        raise WeightsError(f"weights={name!r} is not known; choose one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name]
