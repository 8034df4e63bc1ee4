"""Pipeline options of a plan: the cuts, the schedule and the placement of stages.

The schedules are in `ir/schedules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.ir.layout import Mesh, PipelineAxis
from shardwright.ir.schedules.registry import schedule_named
from shardwright.ir.schedules.schedule import PipelineError

AXIS = "pp"  # of a plan's mesh: the groups of devices that have a stage each, or several
NONE = "none"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a plan, assigned to `groups` of devices.

    `cuts` are the names of the operators that later stages begin with, in order.
    """

    cuts: tuple[str, ...]
    schedule: str
    groups: int

    def __post_init__(self) -> None:
        schedule_named(self.schedule)

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def weights(self) -> str | None:
        """The weight versions of a continuous pipeline's passes; None if the pipeline flushes."""
        return schedule_named(self.schedule).weights

    @property
    def homes(self) -> tuple[int, ...]:
        """The group of every stage."""
        return schedule_named(self.schedule).homes(self.groups, self.stages)

    def check(self, micro_batches: int) -> None:
        """Raise `PipelineError` if the schedule cannot run these stages."""
        schedule, stages, groups = schedule_named(self.schedule), self.stages, self.groups
        name, each = schedule.name, schedule.stages_per_group
        if each is not None and stages != each * groups:
            many = "one stage" if each == 1 else f"{each} stages"
            other = ", or take an interleaved schedule" if each == 1 else ""
            raise PipelineError(
                f"{name} has {many} for each of {AXIS}={groups} groups, not {stages} stages;"
                f" cut into {each * groups}{other}"
            )
        if stages % groups:
            raise PipelineError(
                f"{stages} stages cannot be shared evenly by {AXIS}={groups} groups; cut into a"
                f" multiple of {groups}"
            )
        if wrong := schedule.needs(groups, stages, micro_batches):
            raise PipelineError(f"{name} {wrong}")


def stage_mesh(mesh: Mesh) -> Mesh:
    """The mesh of the devices of one group, of the mesh of all.

    >>> stage_mesh(Mesh.parse("dp=2 pp=4 tp=2"))
    Mesh(axes=(('dp', 2), ('tp', 2)), pipeline=PipelineAxis(outer=1, groups=4))
    """
    axes = tuple((name, size) for name, size in mesh.axes if name != AXIS) or (("dp", 1),)
    outer, groups = mesh.names.index(AXIS) if AXIS in mesh.names else 0, groups_of(mesh)
    inside = groups > 1 and prod(mesh.shape[:outer]) > 1
    return Mesh(axes, PipelineAxis(outer, groups) if inside else None)


def whole_mesh(stage: Mesh, groups: int) -> Mesh:
    """The mesh of the devices of all `groups`, of the mesh of one.

    >>> str(whole_mesh(stage_mesh(Mesh.parse("dp=2 pp=4 tp=2")), 4))
    'dp=2 pp=4 tp=2'
    """
    outer = stage.pipeline.outer if stage.pipeline is not None else 0
    return Mesh((*stage.axes[:outer], (AXIS, groups), *stage.axes[outer:]))


def groups_of(mesh: Mesh) -> int:
    """The number of groups of devices in a pipeline on `mesh`; 1 without one."""
    return dict(mesh.axes).get(AXIS, 1)


@dataclass(frozen=True, slots=True)
class StageRanks:
    """The ranks of each pipeline group, whose devices are numbered as the mesh of one group is.

    Attributes:
        groups: pipeline groups.
        size: devices of each.
        neighbours: how many ranks of a group follow each other: those along the axes inside of the
            pipeline's.
    """

    groups: int
    size: int
    neighbours: int

    @classmethod
    def of(cls, stage: Mesh, groups: int) -> StageRanks:
        """The ranks of `groups`, each on the mesh `stage`.

        >>> StageRanks.of(stage_mesh(Mesh.parse("dp=2 pp=2 tp=2")), 2).of_group(0)
        (0, 1, 4, 5)
        """
        outer = stage.pipeline.outer if stage.pipeline is not None else 0
        return cls(groups, stage.size, prod(stage.shape[outer:]))

    def rank(self, group: int, place: int) -> int:
        """The rank of the device at `place` of a group."""
        row, column = divmod(place, self.neighbours)
        return (row * self.groups + group) * self.neighbours + column

    def of_group(self, group: int) -> tuple[int, ...]:
        """The ranks of all devices of a group, in their order in it."""
        return tuple(self.rank(group, place) for place in range(self.size))

    def position(self, rank: int) -> tuple[int, int]:
        """The group of a rank, and its place in the group."""
        row, column = divmod(rank, self.neighbours)
        row, group = divmod(row, self.groups)
        return group, row * self.neighbours + column
