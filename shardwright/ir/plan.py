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
from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.ir.pipeline import NONE, Pipeline, StageRanks, groups_of, stage_mesh
from shardwright.ir.timeline import Timeline

NO_TIME = Seconds(0.0)
NO_BYTES = Bytes(0)
FORMAT = 3  # of plan files; raised when an older reader would misread them


class PlanError(ValueError):
    """A plan that cannot be read, or that belongs to another model or machine."""


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor argument of the model.

    Attributes:
        key: its path in the call: `args.0`, `kwargs.labels`.
        shape: its global shape.
        dtype: its dtype, as torch names it.
        requires_grad: whether the step computes its gradient.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """One operator under the plan.

    Attributes:
        name: its name in the graph.
        target: its name in `torch.ops`.
        source: module, file and line of the user's code.
        tiling: the split factor of its rule per mesh axis, `"-"` where every device computes it
            whole.
        splits: the same in words: `"batch"`, `"heads"`, `"features (sum)"`.
        layout: the layout of its first result.
        seconds: forward and backward, on the slowest rank.
        saved_bytes: kept for the backward pass, per rank.
        segment: number of its recomputed segment, from 1 on; 0 if it is not recomputed.
        kept: whether it runs once, though it is inside of a recomputed segment.
        freed_bytes: of an operator that runs again, what it would keep for the backward pass in
            addition if nothing was recomputed, per rank.
        backward_seconds: the part of `seconds` for gradients.
        reads: names of the operators, parameters and inputs that it reads.
    """

    name: str
    target: str
    source: Source
    tiling: tuple[str, ...]
    splits: tuple[str, ...]
    layout: Layout
    seconds: Seconds  # forward and backward, on the slowest rank
    saved_bytes: Bytes  # kept for the backward pass, per rank
    segment: int = 0  # number of its recomputed segment, from 1 on; 0 if it is not recomputed
    backward_seconds: Seconds = NO_TIME  # of `seconds`, what the gradients take
    reads: tuple[str, ...] = ()  # operators, parameters, inputs, ... that it takes
    kept: bool = False  # whether it runs once, though it is inside of a recomputed segment
    freed_bytes: Bytes = NO_BYTES  # what recomputing it spares, per rank

    @property
    def forward_seconds(self) -> Seconds:
        """Seconds of one forward run; a recomputed operator runs forward twice."""
        return Seconds((self.seconds - self.backward_seconds) / (2 if self.runs_again else 1))

    @property
    def kind(self) -> str:
        """The operator without its library and overload.

        `aten.linear.default` is `linear`.
        """
        return self.target.split(".")[1] if "." in self.target else self.target

    @property
    def runs_again(self) -> bool:
        """Whether it is recomputed in the backward pass."""
        return self.segment > 0 and not self.kept


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """The storage of one parameter between steps.

    Attributes:
        name: its name in the module.
        layout: its layout.
        bytes: weight, gradient and optimizer state, per rank.
        seconds: its optimizer update, per rank.
        regathered: whether a gathered copy is freed after the forward pass and gathered again
            (`reshard_after_forward` of FSDP2).
    """

    name: str
    layout: Layout
    bytes: Bytes  # weight, gradient and optimizer state, per rank
    seconds: Seconds  # optimizer update, per rank
    regathered: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether the optimizer updates it; a frozen parameter has no update."""
        return self.seconds > 0


class Phase(enum.StrEnum):
    """The phase of a step in which a redistribution takes place."""

    FORWARD = "forward"
    RECOMPUTE = "again"  # in the backward pass, of a value that the forward pass did not keep
    BACKWARD = "backward"  # of a gradient


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """One redistribution on an edge of the graph, in one phase of the step.

    Attributes:
        value: the name of the value.
        consumer: the operator that reads the value, `""` where the step returns it.
        phase: forward, backward, or again in the backward pass.
        collectives: such as `"all_reduce tp"`, in the order they run.
        bytes: of the largest tile that takes part.
        seconds: of all times together.
        times: how often it runs in a step.
    """

    value: str
    consumer: str
    phase: Phase
    collectives: tuple[str, ...]  # such as "all_reduce tp", in the order they run
    bytes: Bytes  # of the largest tile that takes part
    seconds: Seconds  # of all times
    times: int = 1


class RemarkKind(enum.Enum):
    """The reasons for a remark."""

    DISCOVERED = "discovered"  # their rule was found by experiment
    STATED = "stated"  # the user stated their rule
    REPLICATED = "replicated"  # they cannot be split: every device computes all of them
    OPAQUE = "opaque"  # sub-modules that are kept whole
    EXPLICIT = "explicit"  # the parts of a decomposed operator


@dataclass(frozen=True, slots=True)
class Remark:
    """Operators that share a remark.

    `what` is their target, or for parts the operator they replace; `text` the rule
    or the reason; `ops` their names; `count` how often `what` occurs.
    """

    kind: RemarkKind
    what: str
    text: str
    ops: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Rival:
    """The cost of another plan of the same search.

    Attributes:
        name: that of a baseline, else empty.
        devices: number of devices.
        step_seconds: predicted seconds of a step.
        peak_bytes: predicted peak bytes per rank.
        is_simulated: whether both come from a simulated step, not from the tables of the search.
    """

    name: str
    devices: int
    step_seconds: Seconds
    peak_bytes: Bytes
    is_simulated: bool = False


_UNKNOWN = Seconds(0.0)


@dataclass(frozen=True)
class Plan:
    """Everything `parallelize` needs, and everything `explain` prints.

    * `step_seconds`: predicted time of one optimizer step; `peak_bytes`: memory of the worst rank;
    * `lower_bound_seconds`: a time that no plan of the same cost model within the same memory can
      beat;
    * `overlap`: the fraction of gradient reductions that the machine hides behind computation;
      `gather_overlap`: the same of parameter gathers and their gradients (None: equal);
    * `contention`: the factor by which collectives along two axes delay each other;
    * `expert_skew`: rows of the busiest device over the mean, where devices hold different experts;
      0 where none do; `host_devices`: devices of a host, where tokens go to hosts first and from
      there to the devices of their experts (`ir/hosts.py`), else 0;
    * `timeline`: when everything of a step runs, as its step program was simulated; None where it
      was not; of an asynchronous pipeline it has several steps, from an empty pipeline on;
    * `gradient_sync`: after which micro-batches gradients are reduced, `"every"` or `"last"`; None
      for the default (`ir/gradient_sync.py`); `compiled`: whether layers run through
      `torch.compile`; `async_tp`: whether the time of messages along `tp` is that beside matrix
      products, as in `Strategy`, while the program sends them as it does without; `ep_overlap`:
      the same of messages of experts beside operators of another micro-batch;
    * `ahead`: how many buckets of parameters are gathered before the one that operators read;
      `separates_gathers`: whether they have a communicator of their own where reductions of
      gradients are in flight beside them;
    * `offload`: what is kept in the memory of the host, as in `Strategy`; `on_device`: the
      recomputed segments whose inputs stay on the device nevertheless;
    * `update_group_bytes`: the optimizer updates parameters in groups of at most so many bytes of a
      rank's tiles, which bounds its temporaries; 0: all at once; None: the same, until the plan's
      memory is simulated, which chooses groups where the update needs most of a step;
    * `useful_seconds`: of a step's useful operations, if one device computed them at its peak; 0
      where it is not known; `dtype`: that of matrix products, "tf32" for those of float32 that
      round their operands; empty where parameters have several, or in files of older versions;
    * `remarks`: on operators without a written rule, and on decomposed ones;
    * `numerics`: the options under which the graph was captured; `chosen_precision`: a sentence on
      the precision and who chose it, if a command did;
    * `rivals`: the costs of the plans that it was chosen from.
    """

    fingerprint: str
    machine: str
    mesh: Mesh
    optimizer: str
    step_seconds: Seconds
    peak_bytes: Bytes
    lower_bound_seconds: Seconds
    inputs: tuple[InputSpec, ...]
    constants: tuple[tuple[str, Any], ...]  # arguments of the call other than tensors
    parameters: tuple[PlannedParameter, ...]
    ops: tuple[PlannedOp, ...]
    transfers: tuple[PlannedTransfer, ...]
    name: str = "searched"  # or the baseline it is: "data parallel", ...
    stages: int = 1
    schedule: str = NONE
    cuts: tuple[str, ...] = ()  # the operators that later stages begin with
    receive_seconds: tuple[
        Seconds, ...
    ] = ()  # per cut, to send one micro-batch's activations, or gradients
    micro_batches: int = 1  # gradients of a step's micro-batches are accumulated
    gradient_sync: str | None = None  # as in `ir/gradient_sync.py`
    async_tp: bool = False  # whether messages of `tp` are priced beside matrix products
    ep_overlap: bool = False  # whether those of experts are priced beside other micro-batches
    compiled: bool = False  # whether layers run through `torch.compile`
    ahead: int = 1  # buckets of parameters that are gathered before they are read
    separates_gathers: bool = False  # whether they do not wait for reductions of gradients
    offload: tuple[str, ...] = ()  # what is kept in the memory of the host
    on_device: tuple[int, ...] = ()  # segments whose inputs are not
    update_group_bytes: Bytes | None = None  # of parameters that are updated at once
    overlap: float = 0.0
    gather_overlap: float | None = None
    contention: float = 1.0
    expert_skew: float = 0.0
    host_devices: int = 0
    useful_seconds: Seconds = _UNKNOWN
    dtype: str = ""  # of matrix products
    notes: tuple[str, ...] = field(default=())
    remarks: tuple[Remark, ...] = field(default=())
    numerics: Numerics = EXACT
    chosen_precision: str = ""
    rivals: tuple[Rival, ...] = ()
    memory: Memory | None = None  # the parts of `peak_bytes`; None where it was not simulated
    timeline: Timeline | None = None

    @property
    def devices(self) -> int:
        """Number of devices, one rank each."""
        return self.mesh.size

    @property
    def utilisation(self) -> float | None:
        """Model FLOPs utilisation (MFU): useful operations over those that devices could compute.

        None where it is not known.
        """
        whole = self.step_seconds * self.devices
        return self.useful_seconds / whole if self.useful_seconds and whole else None

    @property
    def added_seconds(self) -> Seconds:
        """The sum of the seconds of all operators, transfers and updates, which nothing hides."""
        parts = [op.seconds for op in self.ops]
        parts += [transfer.seconds for transfer in self.transfers]
        return Seconds(sum(parts) + sum(parameter.seconds for parameter in self.parameters))

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages; None if all of the plan's devices run the whole model."""
        if self.schedule == NONE:
            return None
        return Pipeline(self.cuts, self.schedule, groups_of(self.mesh))

    @property
    def stage_ranks(self) -> StageRanks:
        """The ranks of each group of devices; without a pipeline there is one group."""
        pipeline = self.pipeline
        return StageRanks.of(self.layout_mesh, 1 if pipeline is None else pipeline.groups)

    @property
    def is_asynchronous(self) -> bool:
        """Whether its stages compute with several versions of the weights, without a flush."""
        return self.pipeline is not None and self.pipeline.weights is not None

    @property
    def layout_mesh(self) -> Mesh:
        """The mesh of layouts and tilings: in a pipeline that of one group."""
        return self.mesh if self.schedule == NONE else stage_mesh(self.mesh)

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Layout of every parameter, by its name in the module, and of every operator's result."""
        found = {op.name: op.layout for op in self.ops}
        found.update((p.name, p.layout) for p in self.parameters)
        return found

    @property
    def tilings(self) -> Mapping[str, tuple[str, ...]]:
        """The tiling of every operator, as `PlannedOp.tiling`."""
        return {op.name: op.tiling for op in self.ops}

    def __str__(self) -> str:
        peak = self.peak_bytes / 2**20
        size = f"{peak / 1024:.2f} GiB" if peak >= 1024 else f"{peak:.4g} MiB"
        if peak < 1:
            size = f"{peak * 1024:.4g} KiB"
        batches = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return (
            f"{self.name}: {self.mesh} on {self.machine}{batches},"
            f" {self.step_seconds * 1e3:.2f} ms/step, {size}/rank"
        )


def require_plan(given: object) -> None:
    """Raise `PlanError` unless it is a `Plan`."""
    if not isinstance(given, Plan):
        raise PlanError(
            f"plan is a {type(given).__name__}; give a Plan, as sw.plan(...) returns it or"
            " Plan.load('plan.json') reads it"
        )
