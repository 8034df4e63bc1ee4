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
    """The decisions of a plan: tilings, storage, micro-batches and recomputation on `mesh`.

    `tilings` are by operator, `storage` by parameter name. Copies of parameters
    that are `regathered` are not kept for the backward pass, nor, if it `rereads`, parameters
    themselves, which may change before it. Operators with the same non-zero
    number in `segments` are recomputed together in the backward pass, except those that are
    `kept`. The batch is split into `micro_batches` micro-batches; `gradient_sync`
    (`ir/gradient_sync.py`) gives those after which gradients are reduced. Copies of parameters are
    gathered `ahead` buckets before they are read, and with `separates_gathers` on channels of their
    own where reductions of gradients are in flight beside them. What `offload` names
    (`ir/strategy/fields.py`) is kept in the memory of the host, but for inputs of the recomputed
    segments `on_device`. Layers run `compiled` or eagerly. Parameters are updated in groups of at
    most `update_group_bytes` of a rank's tiles, with 0 all at once; None is not decided. Of the
    operators `in_8_bit` the products are in 8 bits. Tokens go to their experts by hosts of
    `host_devices` devices, 0 if there is one host. With a `pipeline`, `mesh` is that of one of its
    groups.
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
