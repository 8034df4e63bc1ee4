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
    """A way to choose weights that is not known."""


def _now(stage: int, stages: int) -> Horizon:
    return Horizon(0, 0)


@dataclass(frozen=True, slots=True)
class Weights:
    """A way to choose weights.

    * `horizon`: by how many updates each pass predicts;
    * `predictor`: how, None where nothing is predicted;
    * `stashes`: whether the backward pass uses the weights that the forward pass used, else those
      of its own moment.
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
    """The way called `name`; raises `WeightsError` with all names if there is none."""
    if name not in WEIGHTS:
        raise WeightsError(f"weights={name!r} is not known; choose one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name]
