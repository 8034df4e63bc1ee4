"""Which meshes and which finished plans the user's constraints permit.

The well-known plans are shown as they are, so they are judged after the fact; what is searched has
its choices left out beforehand (`constrain.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwright.cost.model import CostModel
from shardwright.ir.constraints import (
    EVERY_AXIS,
    Along,
    Cap,
    Constraint,
    ConstraintError,
    Forbid,
    OnMesh,
    Pin,
)
from shardwright.ir.layout import REPLICATE, Layout, Mesh
from shardwright.rules.naming import dimension_names
from shardwright.rules.rule import Tiling
from shardwright.search.constrain import Marks, exists, hits
from shardwright.search.meshes import AXES, meshes_of


def allowed_meshes(
    devices: int, constraints: Sequence[Constraint], given: Sequence[Mesh] | None = None
) -> tuple[Mesh, ...]:
    """The meshes to search, of those `given` or else of all; raises `ConstraintError` for none.

    A mesh of one axis is there under the name of every axis that a pin speaks of.
    """
    fixed = [c.mesh for c in constraints if isinstance(c, OnMesh)]
    spoken = [(c, a.axis) for c in constraints if isinstance(c, Pin | Forbid) for a in c.along] + [
        (c, c.axis) for c in constraints if isinstance(c, Cap)
    ]
    known = {*AXES, *(name for mesh in (*fixed, *(given or ())) for name in mesh.names)}
    for constraint, axis in spoken:
        if axis not in (EVERY_AXIS, *known):
            names = ", ".join(sorted(known))
            raise ConstraintError(
                f"{constraint}: there is no axis {axis}; meshes have {names}, or name your own in a"
                " mesh constraint such as 'mesh dp=4 ep=2'"
            )
    found = given or fixed or _default_meshes(devices, constraints, {axis for _, axis in spoken})
    found = [mesh for mesh in found if mesh.size == devices and (not fixed or mesh in fixed)]
    if not found:
        raise ConstraintError(
            f"{'; '.join(f'mesh {mesh} is of {mesh.size}' for mesh in fixed)}, not of {devices}"
            f" device{'s' * (devices > 1)}; give sizes whose product is that"
        )
    caps = [c for c in constraints if isinstance(c, Cap)]
    left = [mesh for mesh in found if all(_keeps_mesh(cap, mesh, constraints) for cap in caps)]
    if not left:
        said = "; ".join(map(str, caps))
        raise ConstraintError(f"{said}: no mesh of {devices} devices is that narrow; raise a cap")
    return tuple(left)


def require_one(refused: Sequence[str], tried: int, devices: int) -> None:
    """Raise `ConstraintError` with the reasons if all of the `tried` meshes are refused."""
    if len(refused) == tried:
        reasons = sorted(dict.fromkeys(refused), key=lambda reason: " has no axis " in reason)
        more = f" (other meshes: {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
        raise ConstraintError(
            f"no plan on {devices} devices meets the constraints: {reasons[0]}{more}"
        )


def _default_meshes(
    devices: int, constraints: Sequence[Constraint], spoken: Iterable[str]
) -> list[Mesh]:
    found = list(meshes_of(devices, 3 if "sp" in spoken else 2))
    pinned = {a.axis for c in constraints if isinstance(c, Pin) for a in c.along} - {EVERY_AXIS}
    if devices > 1:
        found += [Mesh(((name, devices),)) for name in sorted(pinned - {"dp"})]
    return found


def broken(
    constraints: Sequence[Constraint],
    marks: Marks,
    like: Mapping[str, str],
    model: CostModel,
    tilings: Mapping[str, Tiling],
    storage: Mapping[str, Layout],
) -> tuple[Constraint, ...]:
    """The constraints that a plan of the space of `model` does not keep.

    `like` maps names of the marked graph to those of the model's graph, where they differ.
    """
    mesh, analysis = model.mesh, model.analysis
    names = dimension_names(model.graph, analysis)
    found = {c for c in constraints if not _keeps_mesh(c, mesh, constraints)}
    seen: set[object] = set()
    for name, numbers in marks.of.items():
        rep = like.get(name, name)
        if mesh.size == 1 or (rep, numbers) in seen:
            continue
        seen.add((rep, numbers))
        for number in numbers:
            constraint, along = marks.statements[number]
            if along.placements:
                counts = [len(sizes) for sizes in analysis.atoms[rep]]
                can = any(exists(p, counts) for p in along.placements)
                does = [p in along.placements for p in storage[rep].placements]
                whole = REPLICATE in along.placements
            else:
                rule = analysis.rules[rep]
                meant = hits(along, rule, names)
                can, whole = bool(meant), 0 in meant
                does = [rule.choices().index(choice) in meant for choice in tilings[rep]]
            if can and not _keeps(constraint, along, mesh, does, whole):
                found.add(constraint)
    return tuple(c for c in constraints if c in found)


def _keeps(
    constraint: Pin | Forbid, along: Along, mesh: Mesh, does: Sequence[bool], whole: bool
) -> bool:
    named = [
        done
        for (name, size), done in zip(mesh.axes, does, strict=True)
        if size > 1 and along.axis in (name, EVERY_AXIS)
    ]
    if isinstance(constraint, Forbid):
        return not any(named)
    return all(named) if named else whole


def _keeps_mesh(constraint: Constraint, mesh: Mesh, every: Sequence[Constraint]) -> bool:
    if isinstance(constraint, OnMesh):
        return any(isinstance(c, OnMesh) and c.mesh == mesh for c in every)
    if isinstance(constraint, Cap):
        return dict(mesh.axes).get(constraint.axis, 1) <= constraint.size
    return True
