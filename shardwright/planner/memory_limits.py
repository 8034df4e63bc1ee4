"""A memory limit before the search: what all plans need, and chunks of loss and MLPs that help."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.ir.frontier import InfeasibleError, format_bytes
from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind
from shardwright.ir.layout import Bytes
from shardwright.ir.options.optimizers import offloadable, optimizer_spec, placed
from shardwright.ir.options.plan_options import OptionsError, PlanOptions
from shardwright.machine.model import Machine
from shardwright.planner.tables.memory import state_bytes
from shardwright.rules.operators.chunks import with_chunks
from shardwright.rules.operators.loss_chunks import LossChunksError, most_logits
from shardwright.rules.operators.mlp_chunks import MlpChunksError, largest_mlp

_PART_OF_CHUNK = 64  # of the memory of a rank, what a chunk takes by default
_MOST_CHUNKS = 1024

WEIGHTS = "weights"
STATE = "weights, gradients and optimizer state"


def limit_on(machine: Machine, memory_limit: int | str | None) -> int | None:
    """The memory limit in bytes, by default that of a device of `machine`; None is no limit."""
    if memory_limit is None:
        return machine.device.usable_bytes
    return None if isinstance(memory_limit, str) else memory_limit


def check_limit(machine: Machine, memory_limit: int | str | None, needed: int, what: str) -> None:
    """Raise `InfeasibleError` where the devices together cannot hold `needed` bytes of `what`.

    At least one rank holds an even share or more. `memory_limit` is as in `Frontier.fastest`.
    """
    limit = limit_on(machine, memory_limit)
    least = -(-needed // machine.devices)
    if limit is not None and least > limit:
        devices = f"{machine.devices} device{'s' * (machine.devices > 1)}"
        raise InfeasibleError(
            f"{what} alone need {format_bytes(least)} on each of {devices} of {machine}, the limit"
            f" is {format_bytes(limit)}: raise the limit or take more devices",
            Bytes(least),
        )


def offload_of(machine: Machine, options: PlanOptions) -> bool | None:
    """Whether inputs of recomputed segments may wait on the host; None if only where needed.

    Where they may, so may the state of the optimizer, which is only searched where nothing fits
    with it on the device. By default they do not on CPUs, whose memory is that of the host, and on
    machines that state no link to the host or none of its memory.

    Raises `OptionsError` if offload is asked for and the machine states none.
    """
    device = machine.device
    has = device.host_bytes_per_s is not None and device.host_memory_bytes is not None
    if options.offload and not has:
        raise OptionsError(
            f"{machine.name} has no host_bandwidth or no host_memory; give both, or leave offload"
            " out"
        )
    possible = has and options.recompute and machine.backend_spec.device != "cpu"
    return options.offload if options.offload is not None or possible else False


def optimizers_on_host(machine: Machine, options: PlanOptions) -> tuple[str, ...]:
    """The optimizer of a search with its state on the host, then with parameters there, too.

    Each uses less of the device, and takes longer, than the one before it. There are none where
    inputs of segments may not be on the host, but for recomputation. Stages of a pipeline read
    parameters on the device.
    """
    device, name = machine.device, options.optimizer
    has = device.host_bytes_per_s is not None and device.host_memory_bytes is not None
    on_cpu = machine.backend_spec.device == "cpu" and options.offload is None
    permitted = options.offload is not False and not options.allow_async and not on_cpu
    if not has or not permitted or not offloadable(name):
        return ()
    state = ("optimizer",) if optimizer_spec(name).state_tensors else ()
    staged = isinstance(options.stages, tuple) and 1 not in options.stages
    ways = [*([state] if state else []), *([] if staged else [("optimizer", "parameters")])]
    return tuple(placed(name, way) for way in ways)


def least_state_bytes(graph: Graph, machine: Machine, options: PlanOptions) -> Bytes:
    """Bytes of parameters, gradients and state that the devices of `machine` must hold in total."""
    return state_bytes(graph, (options.optimizer, *optimizers_on_host(machine, options))[-1])


def check_weights(
    machine: Machine, memory_limit: int | str | None, needed: int, options: PlanOptions
) -> None:
    """Raise `InfeasibleError` where the devices together cannot hold weights of `needed` bytes.

    Where these may be in the memory of the host it is where not even that has room for them.
    """
    *_, last = (options.optimizer, *optimizers_on_host(machine, options))
    room = (machine.device.host_memory_bytes or 0) * machine.devices
    if not optimizer_spec(last).by_host or needed > room:
        check_limit(machine, memory_limit, needed, WEIGHTS)


class SearchForms(NamedTuple):
    """The forms of a graph to search: in any case, and where memory is tight."""

    plain: tuple[Graph, ...]
    tight: tuple[Graph, ...]

    @property
    def every(self) -> tuple[Graph, ...]:
        """All forms, those first that are searched in any case."""
        return (*self.plain, *self.tight)


def forms_to_search(graph: Graph, machine: Machine, options: PlanOptions) -> SearchForms:
    """The forms of `graph`: its loss and MLPs in each number of chunks that `options` name.

    Where they name none, these are whole in plain forms. Where memory is tight, the loss is also in
    the least power of two of chunks for which float32 logits of one, on even shares of the tokens,
    are a small part of the memory limit, and MLPs are in as many for tensors of inner width, on as
    few tokens as even shares of whole samples leave, if these numbers are more than one. A graph
    that is in chunks already stays so.

    Raises `LossChunksError` or `MlpChunksError` if chunks that are asked for are not possible.
    """
    now = graph.numerics
    _require_same("loss_chunks", now.loss_chunks, options.loss_chunks, LossChunksError)
    _require_same("mlp_chunks", now.mlp_chunks, options.mlp_chunks, MlpChunksError)
    limit = limit_on(machine, options.memory_limit)
    losses = sorted({*(options.loss_chunks or (now.loss_chunks,))})
    mlps = sorted({*(options.mlp_chunks or (now.mlp_chunks,))})
    plain = [(loss, mlp) for mlp in mlps for loss in losses]
    tight: list[tuple[int, int]] = []
    if options.loss_chunks is None and now.loss_chunks == 1:
        rows, classes = most_logits(graph)
        whole = rows * classes * ITEM_BYTES["float32"] / machine.devices
        losses = [_useful(whole, classes, limit)]
        tight = [(losses[0], mlp) for mlp in mlps if losses[0] > 1]
    if options.mlp_chunks is None and now.mlp_chunks == 1:
        rows, row_bytes = largest_mlp(graph)
        least = rows // max(machine.devices, _samples(graph))
        count = _useful(least * row_bytes, least, limit)
        tight += [(losses[-1], count)] if count > 1 else []
    return SearchForms(
        tuple(with_chunks(graph, *pair) for pair in plain),
        tuple(with_chunks(graph, *pair) for pair in tight),
    )


def _require_same(
    name: str, now: int, wanted: tuple[int, ...] | None, error: type[ValueError]
) -> None:
    """Raise `error` where a graph in chunks was captured with others than those asked for."""
    if now > 1 and wanted is not None and set(wanted) != {now}:
        raise error(f"the graph was captured with {name}={now}; leave it out of the search")


def _useful(num_bytes: float, most: int, limit: int | None) -> int:
    """The least power of two of chunks of which one is a small part of the limit."""
    count = 1
    while limit is not None and count < min(most, _MOST_CHUNKS):
        if num_bytes / count <= limit / _PART_OF_CHUNK:
            break
        count *= 2
    return count


def _samples(graph: Graph) -> int:
    """The leading size of the first input, the samples of a batch; 1 where none has a size."""
    shapes = (graph.tensor[leaf.name].shape for leaf in graph.leaves_of(LeafKind.INPUT))
    return next((shape[0] for shape in shapes if shape), 1)
