"""All-to-all of tokens to the devices that hold their experts, and back (`Route`).

Along each axis that routes, an operator runs two all-to-alls of rows in the forward pass and their
reverse in the backward pass. The busiest device receives `Machine.expert_skew` times the mean
number of rows, and all others wait for it. As routing depends on the data, devices exchange the
numbers of rows first. Scores that scale rows at their experts go with the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.plan import Phase, PlannedTransfer
from shardwright.ir.redistribution import Collective
from shardwright.planner.tables.objective import Objective
from shardwright.planner.tables.options import Options
from shardwright.rules.rule import Route, Rule
from shardwright.simulate.costs.workload import Workload, routed_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertAllToAll:
    """Seconds along each mesh axis under each option, (axes, K), and bytes of the rows, (K,)."""

    forward: Floats
    backward: Floats
    bytes: Ints

    def seconds(self, again: bool) -> Floats:
        """Seconds of a step, with a second forward pass if `again`: (K,)."""
        total: Floats = (self.forward * (1 + again) + self.backward).sum(axis=0)
        return total


def exchanges(rule: Rule, work: Workload, options: Options, measure: Objective) -> ExpertAllToAll:
    """The exchanges of an operator with routes, under each of its options."""
    routes = np.array([isinstance(choice, Route) for choice in rule.choices()])
    routed = routes[np.array(options.choices, np.int64).reshape(len(options), -1)].T
    there, back = routed_bytes(work, options.sizes)
    forward = np.zeros(routed.shape)
    for axis, here in enumerate(routed):
        forward[axis] = np.where(here, measure.exchanges(axis, there + back), 0.0)
    backward = forward if work.has_backward else np.zeros(routed.shape)
    return ExpertAllToAll(forward, backward, np.maximum(there, back))


def exchanged(
    found: ExpertAllToAll, k: int, mesh: Mesh, times: int, *, again: bool
) -> list[PlannedTransfer]:
    """The transfers of option `k`, `times` a step; the caller sets their names."""
    phases = [(Phase.FORWARD, found.forward), (Phase.BACKWARD, found.backward)]
    if again:
        phases.insert(1, (Phase.RECOMPUTE, found.forward))
    return [
        PlannedTransfer(
            value="",
            consumer="",
            phase=phase,
            collectives=(f"{Collective.ALL_TO_ALL.value} {name}",) * 2,
            bytes=Bytes(int(found.bytes[k])),
            seconds=Seconds(times * float(seconds[axis, k])),
            times=times,
        )
        for phase, seconds in phases
        for axis, name in enumerate(mesh.names)
        if seconds[axis, k]
    ]
