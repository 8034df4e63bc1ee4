"""Checks of a search's options against machine and batch, before the model is captured.

Commands and `shardwright.plan` check here first, so that a mistake shows before torch is imported
and before a model is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.graph import Graph
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.model import Machine
from shardwright.planner.permitted import meshes_by_groups, requested_stages
from shardwright.rules.micro_batches import check_micro_batch_count

_MOST_STAGES = 64  # the largest number of stages tried by default


class GraphError(ValueError):
    """The object to search is not a `Graph`."""


def require_graph(given: object) -> None:
    """Raise `GraphError` unless it is a `Graph`."""
    if not isinstance(given, Graph):
        raise GraphError(
            f"graph is a {type(given).__name__}; give what sw.capture(model, args) returns"
        )


@dataclass(frozen=True, slots=True)
class SearchScope:
    """The numbers of stages and the meshes that a search covers.

    Attributes:
        groups: the numbers of device groups; each group runs one or more pipeline stages, and 1
            means no pipeline.
        meshes: the meshes of plans without stages.
        every: whether every number in `groups` is searched; if not, hill climbing selects them.
    """

    groups: tuple[int, ...]
    meshes: tuple[Mesh, ...]
    every: bool

    @property
    def pipelines(self) -> bool:
        """Whether plans of more than one stage are searched."""
        return self.groups != (1,)


def search_scope(machine: Machine, options: PlanOptions, batch: int | None = None) -> SearchScope:
    """The numbers of stages and meshes that `options` request on `machine`.

    Args:
        machine: its number of devices limits both.
        options: the options of the search.
        batch: samples in the batch; None if the model is not captured yet.

    Raises:
        ConstraintError: no mesh of these devices keeps the constraints.
        PipelineError: the devices cannot be split into a requested number of stages.
        MicroBatchError: a requested number of micro-batches is larger than the batch.
    """
    if batch is not None and options.counts is not None:
        for count in options.counts if min(options.counts) > batch else ():
            check_micro_batch_count(batch, count)
    wanted, stages = options.constraints, options.stages
    if isinstance(stages, str):  # messages between hosts are what stages save
        every = _stages_of(machine, None) if len(machine.levels) > 1 else (1,)
        return SearchScope(every, meshes_by_groups(machine.devices, (1,), wanted), every=False)
    groups = _stages_of(machine, requested_stages(wanted, stages))
    meshes = meshes_by_groups(machine.devices, groups, wanted, options.meshes)
    if options.allow_async and stages == (1,):  # asynchronous plans need stages, so try some
        return SearchScope(_stages_of(machine, None), meshes, every=False)
    return SearchScope(groups, meshes, every=stages is not None)


def _stages_of(machine: Machine, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of stages to search; raises `PipelineError` for no divisor of the devices."""
    devices = machine.devices
    if wanted is None:
        powers = (2**i for i in range(_MOST_STAGES.bit_length()))
        return tuple(count for count in powers if devices % count == 0)
    for count in wanted:
        if devices % count:
            raise PipelineError(
                f"{count} stages cannot share the {devices} devices of {machine.name} evenly; take"
                " a divisor of that"
            )
    return tuple(sorted(set(wanted)))
