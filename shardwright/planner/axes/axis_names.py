"""Names the mesh axes of plans by their roles.

The search may split any dimension along any axis, so the role of an axis is known only for a plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, final

from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import stage_mesh
from shardwright.ir.plan import Plan, PlannedOp, PlannedParameter, PlannedTransfer
from shardwright.machine.model import Machine
from shardwright.machine.topology import crossed_levels
from shardwright.planner.axes.axis_roles import DATA, ROLES, is_true, means
from shardwright.planner.axes.plan_roles import IDLE, MIXED, axis_uses

T = TypeVar("T", PlannedOp, PlannedParameter, PlannedTransfer)


@final
class AxisNames:
    """Names the axes of the plans of one search by their roles.

    An axis keeps its name if it is not the word of a role, if it is the word of the axis' own role,
    or if the user chose it (`kept`). Parts that several plans share are renamed once.
    """

    def __init__(self, machine: Machine, kept: Collection[str] = ()) -> None:
        self._machine = machine
        self._kept = kept
        self._renamed: dict[tuple[Mesh, int], tuple[Any, Any]] = {}

    def named(self, plan: Plan) -> Plan:
        """The plan, not simulated yet, with every axis named by its role."""
        mesh = plan.layout_mesh
        names = tuple(_distinct(mesh, self._names(plan), self._kept))
        return self._with(plan, names)

    def as_given(self, plan: Plan, meshes: Sequence[Mesh]) -> Plan:
        """The plan of a strategy, with the axis names of the one of `meshes` that matches it."""
        mesh = plan.layout_mesh
        for given in map(stage_mesh, meshes):
            pairs = zip(given.names, mesh.names, strict=False)
            if given.shape == mesh.shape and all(
                word not in ROLES or means(word, name) for word, name in pairs
            ):
                return self._with(plan, given.names)
        return plan

    def _with(self, plan: Plan, names: tuple[str, ...]) -> Plan:
        mesh = plan.layout_mesh
        if names == mesh.names:
            return plan
        new = dict(zip(mesh.names, names, strict=True))
        inner = replace(mesh, axes=tuple((new[name], size) for name, size in mesh.axes))
        return replace(
            plan,
            mesh=Mesh(tuple((new.get(name, name), size) for name, size in plan.mesh.axes)),
            ops=tuple(self._once(inner, op, new) for op in plan.ops),
            parameters=tuple(self._once(inner, one, new) for one in plan.parameters),
            transfers=tuple(self._once(inner, one, new) for one in plan.transfers),
        )

    def _once(self, mesh: Mesh, part: T, new: dict[str, str]) -> T:
        """A part of the plan on the renamed `mesh`."""
        known = self._renamed.get((mesh, id(part)))
        if known is None:
            known = self._renamed[mesh, id(part)] = part, _with_names(part, mesh, new)
        found: T = known[1]
        return found

    def _names(self, plan: Plan) -> Iterator[str]:
        """A name for every axis; two may be equal."""
        mesh, uses = plan.layout_mesh, axis_uses(plan)
        roles = [use.role for use in uses]
        split = {"dp_replicate", "dp_shard"} <= set(roles)  # hybrid sharding
        levels = crossed_levels(self._machine, mesh)
        for (name, size), role, crossed in zip(mesh.axes, roles, levels, strict=True):
            if size == 1 or name not in ROLES or name in self._kept:
                yield name
            elif role in (MIXED, IDLE):
                level = self._machine.levels[max(crossed)].name
                yield re.sub(r"\W", "_", f"{level}{size}")
            elif role in DATA:
                yield role if split else name if is_true(name, role) else "dp"
            else:
                yield name if is_true(name, role) else role


def _distinct(mesh: Mesh, names: Iterator[str], kept: Collection[str]) -> Iterator[str]:
    """The names, numbered from the outermost axis where several are equal."""
    found = list(names)
    counts, seen = Counter(found), Counter[str]()
    for (old, _), name in zip(mesh.axes, found, strict=True):
        seen[name] += 1
        alone = counts[name] == 1 or (name == old and name in kept)
        yield name if alone else _free(name, seen[name], found)


def _free(name: str, number: int, taken: Sequence[str]) -> str:
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


def _with_names(part: T, mesh: Mesh, new: dict[str, str]) -> T:
    if isinstance(part, PlannedTransfer):
        return replace(part, collectives=tuple(_collective(c, new) for c in part.collectives))
    return replace(part, layout=Layout(mesh, part.layout.placements))


def _collective(text: str, new: dict[str, str]) -> str:
    """The text of a collective such as `all_reduce tp` with its axis renamed."""
    kind, _, axis = text.partition(" ")
    return f"{kind} {new[axis]}" if axis else kind
