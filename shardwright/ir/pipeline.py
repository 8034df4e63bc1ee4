"""Pipeline options of a plan: the cuts, the schedule and the placement of stages.

Schedules have the names of `torch.distributed.pipelining`:

    GPipe              all forward passes, then all backward passes
    1F1B               one of each in turns (PipeDream-Flush, arXiv 2006.09503)
    Interleaved1F1B    the same, a rank having several stages (Megatron-LM, arXiv 2104.04473)
    InterleavedZeroBubble, ZBVZeroBubble
                       gradients of weights fill the bubbles (arXiv 2401.10241)

or "async" and the weights that passes use: then no stage ever waits for another's update, which
is another optimisation than that of one device.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.layout import Mesh

AXIS = "pp"  # of a plan's mesh: the groups of devices that have a stage each, or several
SINGLE = ("GPipe", "1F1B")  # schedules of one stage to a group
MULTIPLE = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")  # of several
ASYNC = "async "  # the schedule of a continuous pipeline, then which weights its passes use
WEIGHTS = ("spectrain", "pipeoptim", "spectrain-decay", "pipeoptim-decay", "stash", "stale")
SCHEDULES = (*SINGLE, *MULTIPLE, *(ASYNC + weights for weights in WEIGHTS))
NONE = "none"


class PipelineError(ValueError):
    """A pipeline that cannot run; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a plan, `groups` of devices taking turns at them.

    `cuts` are the names of the operators that later stages begin with, in order.
    """

    cuts: tuple[str, ...]
    schedule: str
    groups: int

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise PipelineError(f"the schedule {self.schedule!r} is none of {known}")

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def weights(self) -> str | None:
        """Which weights the passes of a continuous pipeline use; None if the pipeline flushes."""
        return self.schedule.removeprefix(ASYNC) if self.schedule.startswith(ASYNC) else None

    @property
    def homes(self) -> tuple[int, ...]:
        """The group of every stage."""
        return homes_of(self.schedule, self.groups, self.stages)

    def check(self, micro_batches: int) -> None:
        """Raise `PipelineError` if the schedule cannot run these stages."""
        name, stages, groups = self.schedule, self.stages, self.groups
        if name not in SCHEDULES:
            raise PipelineError(f"schedule {name!r} is not known; take {', '.join(SCHEDULES)}")
        if self.weights is not None and micro_batches > 1:
            raise PipelineError(
                f"{name} takes the batch as a whole, not in {micro_batches} micro-batches"
            )
        if (name in SINGLE or self.weights is not None) and stages != groups:
            raise PipelineError(
                f"{name} has one stage for each of {AXIS}={groups} groups, not {stages} stages;"
                f" cut into {groups}, or take an interleaved schedule"
            )
        if name == "ZBVZeroBubble" and stages != 2 * groups:
            raise PipelineError(
                f"{name} has two stages for each of {AXIS}={groups} groups, not {stages} stages;"
                f" cut into {2 * groups}"
            )
        if stages % groups:
            raise PipelineError(
                f"{stages} stages cannot be shared evenly by {AXIS}={groups} groups; cut into a"
                f" multiple of {groups}"
            )
        if name == "1F1B" and micro_batches < stages:
            raise PipelineError(
                f"{name} with {stages} stages needs at least as many micro-batches, not"
                f" {micro_batches}; take more, or GPipe"
            )
        if name.startswith("Interleaved") and micro_batches % max(1, micro_batches // groups):
            raise PipelineError(
                f"{name} takes micro-batches in rounds of {groups}, which {micro_batches} are not;"
                f" take a multiple of {groups}"
            )


def homes_of(schedule: str, groups: int, stages: int) -> tuple[int, ...]:
    """The group of every stage.

    >>> homes_of("Interleaved1F1B", 2, 4)
    (0, 1, 0, 1)
    >>> homes_of("ZBVZeroBubble", 2, 4)
    (0, 1, 1, 0)
    """
    loop = [stage % groups for stage in range(stages)]
    if schedule == "ZBVZeroBubble":
        half = stages // 2
        loop[half:] = reversed(loop[:half])
    return tuple(loop)


def stage_mesh(mesh: Mesh) -> Mesh:
    """The mesh of the devices of one group."""
    return Mesh(tuple((name, size) for name, size in mesh.axes if name != AXIS) or (("dp", 1),))


def groups_of(mesh: Mesh) -> int:
    """How many groups of devices take part in a pipeline on `mesh`; 1 without one."""
    return dict(mesh.axes).get(AXIS, 1)
