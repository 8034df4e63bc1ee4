"""All that a call of an asynchronous pipeline's program leaves to the next call."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from shardwright.program.step.async_pipeline.versions import Carried, Pairs
from shardwright.runtime.executor.transfers import InFlight
from shardwright.runtime.regions.region_calls import RegionCall

T = TypeVar("T")


class Left(NamedTuple):
    """Values, calls and messages in flight, under the names that the next call has for them."""

    values: dict[str, torch.Tensor | None]
    calls: dict[str, RegionCall]
    in_flight: dict[str, InFlight]

    def by_next_names(self, carried: Carried) -> Left:
        """Take what is `carried` out of these, which have the names of the call that ends."""
        return Left(
            _moved(self.values, carried.values),
            _moved(self.calls, carried.calls),
            _moved(self.in_flight, carried.handles),
        )


def _moved(found: dict[str, T], pairs: Pairs) -> dict[str, T]:
    """Take out what has the first name of a pair; the same under the second name."""
    return {start: found.pop(end) for end, start in pairs if end in found}
