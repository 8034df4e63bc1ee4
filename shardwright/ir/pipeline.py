"""Pipeline options of a plan: the cuts, the schedule and the placement of stages.

The schedules are in `ir/schedules`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.layout import Mesh
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
    """The mesh of the devices of one group."""
    return Mesh(tuple((name, size) for name, size in mesh.axes if name != AXIS) or (("dp", 1),))


def groups_of(mesh: Mesh) -> int:
    """The number of groups of devices in a pipeline on `mesh`; 1 without one."""
    return dict(mesh.axes).get(AXIS, 1)
