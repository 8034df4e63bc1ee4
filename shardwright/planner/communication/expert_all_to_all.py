"""All-to-all of tokens to the devices that hold their experts, and back (`Route`).

Along each axis that routes, an operator runs two all-to-alls of tokens in the forward pass and
their reverse in the backward pass. A token goes once to each device that has some of its experts,
with its choice and its scores, and over several hosts once to each of them first
(`ir/hosts.py`). The busiest device receives `Machine.expert_skew` times the mean number, and all
others wait for it. As routing depends on the data, devices exchange the numbers of tokens first.
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
from shardwright.simulate.costs.expert_visits import visited_share
from shardwright.simulate.costs.workload import (
    Workload,
    product_of,
    routed_bytes,
    routed_choices,
)

_CHOICE_BYTES = 4  # of an expert's index in a message

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExpertAllToAll:
    """Seconds along each mesh axis under each option, (axes, K), and bytes of the tokens, (K,).

    `hops` are the numbers of exchanges along each axis.
    """

    forward: Floats
    backward: Floats
    bytes: Ints
    hops: tuple[int, ...]

    def seconds(self, again: bool) -> Floats:
        """Seconds of a step, with a second forward pass if `again`: (K,)."""
        total: Floats = (self.forward * (1 + again) + self.backward).sum(axis=0)
        return total


def exchanges(
    rule: Rule, work: Workload, options: Options, measure: Objective, mesh: Mesh
) -> ExpertAllToAll:
    """The exchanges of an operator with routes, under each of its options on `mesh`."""
    routes = np.array([isinstance(choice, Route) for choice in rule.choices()])
    routed = routes[np.array(options.choices, np.int64).reshape(len(options), -1)].T
    there, back = (bytes_.astype(np.float64) for bytes_ in routed_bytes(work, options.sizes))
    experts, chosen = routed_choices(work)
    width = product_of(options.sizes, [f for f in work.operands[0].factors if f not in work.routed])
    choice = chosen * (_CHOICE_BYTES + work.operands[2].item_bytes)
    there *= 1.0 + choice / (width * work.operands[0].item_bytes)
    forward, largest = np.zeros(routed.shape), np.zeros(routed.shape[1])
    devices = np.ones(routed.shape[1])
    hops = [measure.token_hops(axis, chosen) for axis in range(len(mesh.axes))]
    for axis, here in enumerate(routed):
        for hop in hops[axis]:
            devices = np.where(here, devices * hop.devices, devices)
            share = visited_share(experts, chosen, devices, work.limit)
            moved = np.ceil(share * (there + back)).astype(np.int64)
            forward[axis] += np.where(here, hop.cost(moved), 0.0)
            largest = np.where(here, share * np.maximum(there, back), largest)
    backward = forward if work.has_backward else np.zeros(routed.shape)
    counts = tuple(len(found) for found in hops)
    return ExpertAllToAll(forward, backward, np.ceil(largest).astype(np.int64), counts)


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
            collectives=(f"{Collective.ALL_TO_ALL.value} {name}",) * (2 * found.hops[axis]),
            bytes=Bytes(int(found.bytes[k])),
            seconds=Seconds(times * float(seconds[axis, k])),
            times=times,
        )
        for phase, seconds in phases
        for axis, name in enumerate(mesh.names)
        if seconds[axis, k]
    ]
