"""The decisions of a plan, as lowering needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import Pipeline, StageRanks
from shardwright.rules.rule import Tiling


@dataclass(frozen=True, slots=True)
class UpdateForm:
    """The form of the optimizer's update.

    Parameters are updated in groups of at most `group_bytes` of a rank's tiles, with 0 all at once;
    None is not decided. With `on_host` the state of a group is copied from the host and back. With
    `by_host` parameters, gradients and state are there, and the host updates all of them at once.
    """

    group_bytes: int | None = None
    on_host: bool = False
    by_host: bool = False


AT_ONCE = UpdateForm()


@dataclass(frozen=True)
class Decisions:
    """The decisions of a plan that lowering needs.

    Attributes:
        mesh: the mesh of all devices; with a `pipeline` that of one of its groups.
        tilings: the tiling of each operator, by name.
        storage: the layout in which each parameter is stored, by name.
        regathered: parameters whose gathered copies are not kept for the backward pass.
        segments: for each operator the number of the segment that it is recomputed with; 0 for
            none.
        micro_batches: how many micro-batches the batch is split into.
        pipeline: the stages and their schedule; None without stages.
        gradient_sync: after which micro-batches gradients are reduced (`ir/gradient_sync.py`).
        kept: operators in recomputed segments that run once, and whose results are kept.
        ahead: how many buckets before they are read copies of parameters are gathered.
        offload: what is kept in the memory of the host (`ir/strategy/fields.py`).
        on_device: of offloaded activations, the segments whose inputs stay on the device.
        compiled: whether layers run through `torch.compile`.
        rereads: whether the backward pass reads parameters themselves again, because they may
            change before it (asynchronous pipelines).
        update_group_bytes: the most bytes of a rank's tiles that are updated at once; 0 is all of
            them, None is not decided.
        in_8_bit: operators whose products are in 8 bits.
        separates_gathers: whether gathers of parameters have channels of their own where
            reductions of gradients are in flight beside them.
        host_devices: how many devices each host has, by which tokens go to their experts; 0 if
            there is one host.
    """

    mesh: Mesh
    tilings: Mapping[str, Tiling]
    storage: Mapping[str, Layout]
    regathered: frozenset[str] = frozenset()
    segments: Mapping[str, int] = field(default_factory=dict)
    micro_batches: int = 1
    pipeline: Pipeline | None = None
    gradient_sync: str | None = None
    kept: frozenset[str] = frozenset()
    ahead: int = 1
    offload: tuple[str, ...] = ()
    on_device: frozenset[int] = frozenset()
    compiled: bool = False
    rereads: bool = False
    update_group_bytes: int | None = None
    in_8_bit: frozenset[str] = frozenset()
    separates_gathers: bool = False
    host_devices: int = 0

    @property
    def update(self) -> UpdateForm:
        """The form of the optimizer's update."""
        if self.hosts_parameters:
            return UpdateForm(0, by_host=True)
        return UpdateForm(self.update_group_bytes, "optimizer" in self.offload)

    @property
    def hosts_parameters(self) -> bool:
        """Whether parameters are in the memory of the host, and copied from there to be read."""
        return "parameters" in self.offload

    @property
    def stage_ranks(self) -> StageRanks:
        """The ranks of each group of devices; without a pipeline there is one group."""
        return StageRanks.of(self.mesh, 1 if self.pipeline is None else self.pipeline.groups)

    @property
    def offloaded(self) -> frozenset[int]:
        """The recomputed segments whose inputs wait in the memory of the host."""
        if "activations" not in self.offload:
            return frozenset()
        return frozenset(self.segments.values()) - self.on_device - {0}


def everything_whole(graph: Graph) -> Decisions:
    """The serial program: one device computes every operator whole."""
    mesh = Mesh((("dp", 1),))
    return Decisions(
        mesh,
        {op.name: (None,) for op in graph.ops},
        {leaf.name: Layout.replicated(mesh) for leaf in graph.leaves_of(LeafKind.PARAMETER)},
    )
