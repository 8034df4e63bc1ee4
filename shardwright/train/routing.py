"""Measures the imbalance of expert routing in a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from shardwright.runtime.sharded_ops.experts import Skew


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Rows of the busiest device divided by the mean, where devices have different experts.

    `busiest` is the mean over all calls of a rank's mixtures in the run, of the rank where it is
    largest; `most` is the maximum over single calls.
    """

    busiest: float
    most: float

    def line(self) -> str:
        """The record as a line of rank 0's log."""
        return json.dumps({"routing": asdict(self)})

    def __str__(self) -> str:
        return f"measured {self.busiest:.2f} (mean), {self.most:.2f} (most)"


def measured_routing(skews: Sequence[Skew], device: torch.device) -> RoutingRecord | None:
    """The imbalance over all ranks, or None if no experts are split; every rank calls it."""
    calls, total = sum(s.calls for s in skews), sum(s.total for s in skews)
    most = max((s.most for s in skews), default=0.0)
    found = torch.tensor([total / max(1, calls), most], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    mean, worst = found.tolist()
    return RoutingRecord(mean, worst) if worst else None
