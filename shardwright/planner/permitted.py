"""The meshes and finished plans that the user's constraints permit.

Baselines are built without constraints and checked afterwards. Searched plans are built from a
space that holds only permitted choices (`constrain.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from shardwright.ir.layout import REPLICATE, Layout, Mesh
from shardwright.ir.options.constraints import (
    EVERY_AXIS,
    Along,
    Cap,
    Constraint,
    ConstraintError,
    Forbid,
    OnMesh,
    OnShape,
    Pin,
)
from shardwright.ir.pipeline import AXIS as PIPELINE
from shardwright.ir.pipeline import StageRanks, stage_mesh
from shardwright.planner.axes.axis_roles import DATA, ROLES, contradicted, means
from shardwright.planner.meshes.meshes import factorisations, mesh_of_shape, meshes_of
from shardwright.planner.space.constrain import Marks, exists, hits
from shardwright.planner.tables.model import CostModel
from shardwright.rules.micro_batches import AXIS as MICRO_BATCHES
from shardwright.rules.naming import dimension_names
from shardwright.rules.rule import Tiling


def requested_stages(
    constraints: Sequence[Constraint], stages: Sequence[int] | None
) -> Sequence[int] | None:
    """The numbers of stages to search: those of mesh constraints if `stages` is (1,)."""
    named = [c.mesh for c in constraints if isinstance(c, OnMesh)]
    if stages is None or tuple(stages) != (1,):
        return stages
    return tuple(sorted({_groups(mesh) for mesh in named})) or stages


def meshes_by_groups(
    devices: int,
    groups: Sequence[int],
    constraints: Sequence[Constraint],
    given: Sequence[Mesh] | None = None,
) -> tuple[Mesh, ...]:
    """The meshes of plans without stages; empty where `groups` lacks 1 or constraints exclude it.

    Raises:
        ConstraintError: the constraints leave no mesh for any number of groups.
    """
    found: tuple[Mesh, ...] = ()
    reasons: list[ConstraintError] = []
    for count in groups:
        try:
            left = allowed_meshes(
                devices // count, constraints, given if count == 1 else None, count
            )
        except ConstraintError as e:
            reasons.append(e)
            continue
        found = left if count == 1 else found
    if len(reasons) == len(groups):
        raise reasons[0]
    return found


def allowed_meshes(
    devices: int,
    constraints: Sequence[Constraint],
    given: Sequence[Mesh] | None = None,
    groups: int = 1,
) -> tuple[Mesh, ...]:
    """The meshes to search: those of `given`, or all, that the constraints permit.

    With several `groups` of devices in a pipeline, these are the meshes of one group. A mesh
    constraint gives the mesh of a group, as `dp=4` or `4`, or of the whole machine, as `pp=2 dp=4`
    or `2x4`. For each axis that a pin names there is also the mesh of that one axis.

    Raises:
        ConstraintError: no mesh is left.
    """
    named = {
        str(c): _mesh(c, devices, groups) for c in constraints if isinstance(c, OnMesh | OnShape)
    }
    for mesh in (*named.values(), *(given or ())):
        if MICRO_BATCHES in mesh.names:
            raise ConstraintError(
                f"mesh {mesh}: {MICRO_BATCHES} is the axis of micro-batches; name it otherwise"
            )
    fixed = [stage_mesh(m) for m in named.values() if _groups(m) in (1, groups)]
    named_axes = [
        (c, a.axis) for c in constraints if isinstance(c, Pin | Forbid) for a in c.along
    ] + [(c, c.axis) for c in constraints if isinstance(c, Cap)]
    found = (
        given or fixed or _default_meshes(devices, constraints, {axis for _, axis in named_axes})
    )
    known = dict.fromkeys(axis for mesh in (*named.values(), *found) for axis in mesh.names)
    known |= dict.fromkeys(ROLES)
    for constraint, axis in named_axes:
        if axis != EVERY_AXIS and not any(means(axis, name) for name in known):
            raise ConstraintError(
                f"{constraint}: there is no axis {axis}; meshes have {', '.join(sorted(known))}, or"
                " name your own in a mesh constraint such as 'mesh dp=4 ep=2'"
            )
    found = [mesh for mesh in found if mesh.size == devices and (not named or mesh in fixed)]
    if not found:
        wrong = named or {f"mesh {mesh}": mesh for mesh in given or ()}
        raise _of_wrong_size(wrong, devices, groups)
    caps = [c for c in constraints if isinstance(c, Cap)]
    left = [mesh for mesh in found if all(_keeps_mesh(cap, mesh, constraints) for cap in caps)]
    if not left:
        caps_text = "; ".join(map(str, caps))
        raise ConstraintError(
            f"{caps_text}: no mesh of {devices} devices is that narrow; raise a cap"
        )
    return tuple(left)


def _groups(mesh: Mesh) -> int:
    return dict(mesh.axes).get(PIPELINE, 1)


def _mesh(constraint: OnMesh | OnShape, devices: int, groups: int) -> Mesh:
    """The mesh that a constraint gives.

    The first size of a shape of all devices becomes the pipeline axis if it equals `groups`.
    """
    if isinstance(constraint, OnMesh):
        return constraint.mesh
    first, *rest = constraint.shape
    if groups > 1 and first == groups and prod(rest) == devices:
        return Mesh(((PIPELINE, groups), *mesh_of_shape(rest or (1,)).axes))
    return mesh_of_shape(constraint.shape)


def _of_wrong_size(named: Mapping[str, Mesh], devices: int, groups: int) -> ConstraintError:
    """The error if no mesh constraint has the number of devices of a group."""
    have = "; ".join(f"{text} is of {mesh.size}" for text, mesh in named.items())
    every, plural = groups * devices, "s" * (groups * devices > 1)
    if groups == 1:
        return ConstraintError(
            f"{have}, not of {every} device{plural}; give sizes whose product is that, or with"
            f" stages a mesh such as {PIPELINE}=2 dp=… of all devices"
        )
    return ConstraintError(
        f"{have}; {groups} stages on {every} devices need the mesh of one stage's group, of"
        f" {devices}, or of all of them, {PIPELINE}={groups} included"
    )


def refuse(reasons: Sequence[str], devices: int) -> None:
    """Raise `ConstraintError` with the `reasons` why meshes have no plan, if there are any."""
    if reasons:
        found = sorted(dict.fromkeys(reasons), key=lambda reason: " has no axis " in reason)
        more = f" (other meshes: {len(found) - 1} more reasons)" if len(found) > 1 else ""
        raise ConstraintError(
            f"no plan on {devices} devices meets the constraints: {found[0]}{more}"
        )


def _default_meshes(
    devices: int, constraints: Sequence[Constraint], named_axes: Iterable[str]
) -> list[Mesh]:
    """The meshes of one and two axes, and meshes with further axes whose roles pins name."""
    pinned = {a.axis for c in constraints if isinstance(c, Pin) for a in c.along} - {EVERY_AXIS}
    others = [role for role in ROLES if role in pinned and role not in ("dp", "tp", "sp")]
    found = list(meshes_of(devices, 3 if "sp" in named_axes else 2))
    for role in others:
        several = (("dp_replicate", "dp_shard"), (role, "tp"), ("dp_replicate", "dp_shard", "tp"))
        for names in several if role in DATA else (("dp", role), ("dp", role, "tp")):
            sizes = factorisations(devices, len(names))
            found += [Mesh(tuple(zip(names, one, strict=True))) for one in sizes]
    if devices > 1:
        found += [Mesh(((name, devices),)) for name in sorted(pinned - {"dp"})]
    return list(dict.fromkeys(found))


def broken(
    constraints: Sequence[Constraint],
    marks: Marks,
    representatives: Mapping[str, str],
    model: CostModel,
    tilings: Mapping[str, Tiling],
    storage: Mapping[str, Layout],
) -> tuple[Constraint, ...]:
    """The constraints that a plan of the space of `model` breaks.

    `representatives` maps names of the marked graph to those of the model's graph, where they
    differ.
    """
    mesh, analysis = model.mesh, model.analysis
    names = dimension_names(model.graph, analysis)
    found = {c for c in constraints if not _keeps_mesh(c, mesh, constraints)}
    if marks.binds_roles(mesh) and contradicted(model, tilings, storage):
        found |= {c for c in constraints if isinstance(c, OnMesh | Cap)}
    seen: set[object] = set()
    for name, numbers in marks.of.items():
        rep = representatives.get(name, name)
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
            if can and not keeps(constraint, along, mesh, does, whole=whole):
                found.add(constraint)
    return tuple(c for c in constraints if c in found)


def keeps(
    constraint: Pin | Forbid, along: Along, mesh: Mesh, does: Sequence[bool], *, whole: bool
) -> bool:
    """Whether a choice keeps a constraint.

    Args:
        constraint: the constraint.
        along: the axes that it names.
        mesh: the mesh of the plan.
        does: for each mesh axis, whether the choice is the one that the constraint names.
        whole: whether every device computes, or stores, the whole of it.
    """
    named = [
        done
        for (name, size), done in zip(mesh.axes, does, strict=True)
        if size > 1 and (along.axis == EVERY_AXIS or means(along.axis, name))
    ]
    if isinstance(constraint, Forbid):
        return not any(named)
    return all(named) if named else whole


def _keeps_mesh(constraint: Constraint, mesh: Mesh, every: Sequence[Constraint]) -> bool:
    if isinstance(constraint, OnMesh | OnShape):
        return any(_is_on(mesh, c) for c in every if isinstance(c, OnMesh | OnShape))
    if isinstance(constraint, Cap):
        size = prod(size for name, size in mesh.axes if means(constraint.axis, name))
        return size <= constraint.size
    return True


def _is_on(mesh: Mesh, constraint: OnMesh | OnShape) -> bool:
    """Whether `mesh`, of all devices or of one group, is that of the constraint without `pp`."""
    if isinstance(constraint, OnShape):
        return mesh.shape == constraint.shape
    given = constraint.mesh
    named = zip(given.names, mesh.names, strict=False)
    matches = mesh.shape == given.shape and PIPELINE not in given.names
    return matches and all(word not in ROLES or means(word, name) for word, name in named)


def permits_mesh(constraints: Sequence[Constraint], mesh: Mesh, groups: int) -> bool:
    """Whether plans of `groups` device groups, each on `mesh`, can keep the constraints.

    The axes of `mesh` are named by their roles. Only constraints that name a mesh or cap the size
    of an axis are checked.
    """
    wanted = [c for c in constraints if isinstance(c, OnMesh | OnShape)]
    plain = _split_axes(mesh)
    fits = not wanted
    for constraint in wanted:
        whole = _mesh(constraint, mesh.size, groups)
        one = _split_axes(stage_mesh(whole))
        named = isinstance(constraint, OnMesh)
        on_one = _is_on(plain, OnMesh(one) if named else OnShape(one.shape))
        ranks = StageRanks.of(stage_mesh(whole), groups)
        fits |= on_one and _groups(whole) in (1, groups) and ranks == StageRanks.of(mesh, groups)
    caps = (c for c in constraints if isinstance(c, Cap))
    return fits and all(_keeps_mesh(cap, mesh, constraints) for cap in caps)


def _split_axes(mesh: Mesh) -> Mesh:
    """The mesh without axes of one device."""
    return Mesh(tuple((name, size) for name, size in mesh.axes if size > 1))
