"""The placement of experts as a plan states it: the busiest device, and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.ir.graph import Op
from shardwright.ir.hosts import goes_by_host, neighbours
from shardwright.ir.plan import PlannedOp
from shardwright.machine.expert_loads import busiest_over_mean
from shardwright.machine.topology import host_devices
from shardwright.planner.tables.model import CostModel
from shardwright.rules.placements import parse_tiling
from shardwright.rules.rule import Route
from shardwright.simulate.costs.workload import routed_choices


class ExpertPlacement(NamedTuple):
    """Rows of the busiest device over the mean, and devices of the hosts that tokens go to first.

    Both are 0 where every device has all experts, the second one also where no axis of experts
    joins several devices of each of several hosts, or tokens have few experts (`ir/hosts.py`).
    """

    skew: float = 0.0
    host_devices: int = 0


def expert_placement(model: CostModel, mixtures: Sequence[tuple[Op, PlannedOp]]) -> ExpertPlacement:
    """The placement of the experts of mixtures, each with its operator in the graph of `model`."""
    mesh, here = model.mesh, host_devices(model.machine)
    near = neighbours(mesh, here)
    skew, by_host = 0.0, False
    for op, planned in mixtures:
        rule = model.analysis.rules[op.name]
        tiling = parse_tiling(rule, planned.tiling)
        parts = rule.owner_parts(tiling, mesh.shape)
        if parts == 1:
            continue
        owned = -(-rule.owners // parts) / rule.owners
        skew = max(skew, busiest_over_mean(model.machine.expert_skew, owned))
        _, chosen = routed_choices(model.meshless.workload(op))
        if not goes_by_host(chosen):
            continue
        routed = zip(mesh.names, tiling, strict=True)
        by_host |= any(name in near and isinstance(choice, Route) for name, choice in routed)
    return ExpertPlacement(skew, here if by_host else 0)
