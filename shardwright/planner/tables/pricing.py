"""Says which objective and which kind of step a cost model prices."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.planner.tables.memory import BucketSizes
from shardwright.planner.tables.objective import Objective


@dataclass(frozen=True, slots=True)
class Pricing:
    """The objective and the kind of step that a cost model prices.

    Attributes:
        optimizer: its name.
        measure: the objective; None is the seconds of a step.
        micro_batches: their number in a step.
        buckets: bytes of full buckets; None computes them from the graph (`bucket_sizes`).
        gradient_sync: after which micro-batches gradients are reduced (`ir/gradient_sync.py`).
        compiled: whether layers run through `torch.compile`.
    """

    optimizer: str = "adamw"
    measure: Objective | None = None
    micro_batches: int = 1
    buckets: BucketSizes | None = None
    gradient_sync: str | None = None
    compiled: bool = False


OF_A_STEP = Pricing()
