"""A plan: one way to train one graph in parallel, with its predicted cost.

`plan_io` writes plans to files, `report/text/explain.py` explains them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.ir.graph import Source
from shardwright.ir.layout import Bytes, Layout, Mesh, Seconds
from shardwright.ir.memory import Memory
from shardwright.ir.numerics import EXACT, Numerics
from shardwright.ir.pipeline import NONE, Pipeline, groups_of, stage_mesh
from shardwright.ir.plan_notes import Remark

NO_TIME = Seconds(0.0)
FORMAT = 1  # of plan files; raised when an older reader would misread them


class PlanError(ValueError):
    """A plan that cannot be read, or that does not belong to what it is used with."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor that the model is called with. `key` is its path: `args.0`, `kwargs.labels`.

    Whether the step computes a gradient of it, too, says `requires_grad`.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """What one operator does under the plan.

    `tiling` names the split factor of its rule per mesh axis ("-" where every
    device computes all of it), `splits` the same in words ("batch", "heads",
    "features (sum)"); `layout` is how its first result lies.
    """

    name: str
    target: str
    source: Source
    tiling: tuple[str, ...]
    splits: tuple[str, ...]
    layout: Layout
    seconds: Seconds  # forward and backward, on the slowest rank
    saved_bytes: Bytes  # kept for the backward pass, per rank
    piece: int = 0  # of the operators that are recomputed together, from 1 on; 0 if it is not
    backward_seconds: Seconds = NO_TIME  # of `seconds`, what the gradients take
    reads: tuple[str, ...] = ()  # operators, parameters, inputs, ... that it takes

    @property
    def forward_seconds(self) -> Seconds:
        """Once forward; an operator that is recomputed runs forward twice."""
        return Seconds((self.seconds - self.backward_seconds) / (2 if self.piece else 1))


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """How one parameter is stored between steps.

    A copy of it that an operator needs in another layout is kept until the
    backward pass, or dropped and `regathered` then.
    """

    name: str
    layout: Layout
    bytes: Bytes  # weight, gradient and optimizer state, per rank
    seconds: Seconds  # optimizer update, per rank
    regathered: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether there is an update; there is none of a frozen parameter."""
        return self.seconds > 0


class Phase(enum.StrEnum):
    """When a redistribution takes place."""

    FORWARD = "forward"
    AGAIN = "again"  # of what the forward pass made and did not keep, in the backward pass
    BACKWARD = "backward"  # of a gradient


@dataclass(frozen=True, slots=True)
class Transfer:
    """One redistribution that an edge needs, in one phase, `times` a step.

    `consumer` is the operator that reads the value, "" where the step returns it.
    """

    value: str
    consumer: str
    phase: Phase
    collectives: tuple[str, ...]  # such as "all_reduce tp", in the order they run
    bytes: Bytes  # of the largest tile that takes part
    seconds: Seconds  # of all times
    times: int = 1


@dataclass(frozen=True, slots=True)
class Rival:
    """What another plan of the same search costs; `name` is that of a baseline, else empty."""

    name: str
    devices: int
    step_seconds: Seconds
    peak_bytes: Bytes


@dataclass(frozen=True)
class Plan:
    """Everything `parallelize` needs, and everything `explain` says.

    `step_seconds` is one optimizer step, `peak_bytes` the memory of the worst
    rank, `lower_bound_seconds` a time that no plan of the same cost model
    within the same memory can beat. `overlap` is the part of sums of gradients that
    the machine hides behind operators, `gather_overlap` that of copies of sharded
    parameters and of their gradients (None: the same), `contention` the part by which
    messages along two axes delay each other. `expert_skew` is how many more rows than
    the mean the busiest device is taken to have where devices hold different experts,
    0 where none do. `remarks` are on operators whose rule nobody wrote and on those
    that were taken apart, `habits` what the graph was captured with, `rivals` the plans
    that it was chosen from.
    """

    fingerprint: str
    machine: str
    mesh: Mesh
    optimizer: str
    step_seconds: Seconds
    peak_bytes: Bytes
    lower_bound_seconds: Seconds
    inputs: tuple[InputSpec, ...]
    constants: tuple[tuple[str, Any], ...]  # arguments of the call that are no tensors
    parameters: tuple[PlannedParameter, ...]
    ops: tuple[PlannedOp, ...]
    transfers: tuple[Transfer, ...]
    name: str = "searched"  # or the baseline it is: "data parallel", ...
    stages: int = 1
    schedule: str = NONE
    cuts: tuple[str, ...] = ()  # the operators that later stages begin with
    ways: tuple[Seconds, ...] = ()  # of a micro-batch's values into these, or gradients back
    micro_batches: int = 1  # pieces of the batch, one after the other; their gradients add up
    overlap: float = 0.0
    gather_overlap: float | None = None
    contention: float = 1.0
    expert_skew: float = 0.0
    notes: tuple[str, ...] = field(default=())
    remarks: tuple[Remark, ...] = field(default=())
    habits: Numerics = EXACT
    rivals: tuple[Rival, ...] = ()
    memory: Memory | None = None  # what `peak_bytes` is made of; None where it was not settled

    @property
    def devices(self) -> int:
        """Number of devices, one rank each."""
        return self.mesh.size

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages; None if all of the plan's devices run the whole model."""
        if self.schedule == NONE:
            return None
        return Pipeline(self.cuts, self.schedule, groups_of(self.mesh))

    @property
    def layout_mesh(self) -> Mesh:
        """The mesh that layouts and tilings are about: in a pipeline that of one group."""
        return self.mesh if self.schedule == NONE else stage_mesh(self.mesh)

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Layout of every parameter, by its name in the module, and of every operator's result."""
        found = {op.name: op.layout for op in self.ops}
        found.update((p.name, p.layout) for p in self.parameters)
        return found

    @property
    def tilings(self) -> Mapping[str, tuple[str, ...]]:
        """What every operator splits per mesh axis, as `PlannedOp.tiling`."""
        return {op.name: op.tiling for op in self.ops}

    def __str__(self) -> str:
        peak = self.peak_bytes / 2**20
        size = f"{peak / 1024:.2f} GiB" if peak >= 1024 else f"{peak:.4g} MiB"
        pieces = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return (
            f"{self.name}: {self.mesh} on {self.machine}{pieces},"
            f" {self.step_seconds * 1e3:.2f} ms/step, {size}/rank"
        )


def require_plan(given: object) -> None:
    """Raise `PlanError` unless it is a `Plan`."""
    if not isinstance(given, Plan):
        raise PlanError(
            f"plan is a {type(given).__name__}; give a Plan, as sw.plan(...) returns it or"
            " Plan.load('plan.json') reads it"
        )
