"""The weight versions that the two passes of a mini-batch see in an asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.runtime.async_pipeline.prediction import Predictor, decayed, linear
from shardwright.runtime.async_pipeline.schedule import (
    Horizon,
    pipeoptim_horizon,
    spectrain_horizon,
)


class WeightsError(ValueError):
    """The name of a rule for weight versions that does not exist."""


def _now(stage: int, stages: int) -> Horizon:
    return Horizon(0, 0)


@dataclass(frozen=True, slots=True)
class Weights:
    """A rule that chooses the weight versions of the two passes.

    * `horizon`: the number of updates by which each pass predicts weights;
    * `predictor`: the prediction method; None if nothing is predicted;
    * `stashes`: whether the backward pass uses the weights of the forward pass, instead of the
      current ones.
    """

    name: str
    horizon: Callable[[int, int], Horizon]
    predictor: Predictor | None = None
    stashes: bool = False


WEIGHTS = {
    weights.name: weights
    for weights in (
        Weights("stale", _now),
        Weights("stash", _now, stashes=True),
        Weights("spectrain", spectrain_horizon, linear),
        Weights("spectrain-decay", spectrain_horizon, decayed),
        Weights("pipeoptim", pipeoptim_horizon, linear),
        Weights("pipeoptim-decay", pipeoptim_horizon, decayed),
    )
}


def weights_named(name: str) -> Weights:
    """The rule called `name`; raises `WeightsError` that lists all names if it is unknown."""
    if name not in WEIGHTS:
        raise WeightsError(f"weights={name!r} is not known; choose one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name]
