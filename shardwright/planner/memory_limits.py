"""A memory limit before the search: what all plans need, and chunks of the loss that help."""

from __future__ import annotations

from shardwright.ir.frontier import InfeasibleError, format_bytes
from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.ir.layout import Bytes
from shardwright.ir.options.plan_options import OptionsError, PlanOptions
from shardwright.machine.model import Machine
from shardwright.rules.operators.loss_chunks import (
    LossChunksError,
    most_logits,
    with_loss_chunks,
)

_PART_OF_CHUNK = 64  # of the memory of a rank, what logits of a chunk take by default
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

    By default they do not on CPUs, whose memory is that of the host, and on machines that state no
    link to the host or none of its memory.

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


def loss_forms(graph: Graph, machine: Machine, options: PlanOptions) -> tuple[Graph, ...]:
    """The forms of `graph` to search: its loss in each number of chunks that `options` name.

    By default the loss is whole, and in the least power of two of chunks for which float32 logits
    of one, on even shares of the tokens, are a small part of the memory limit, where that is more
    than one. A graph whose loss is in chunks already has one form.

    Raises `LossChunksError` if the loss cannot be in chunks that are asked for.
    """
    wanted, now = options.loss_chunks, graph.numerics.loss_chunks
    if now > 1:
        if wanted is not None and set(wanted) != {now}:
            raise LossChunksError(
                f"the graph was captured with loss_chunks={now}; leave it out of the search"
            )
        return (graph,)
    if wanted is None:
        limit = limit_on(machine, options.memory_limit)
        rows, classes = most_logits(graph)
        whole = rows * classes * ITEM_BYTES["float32"] / machine.devices
        count = 1
        while limit is not None and count < min(classes, _MOST_CHUNKS):
            if whole / count <= limit / _PART_OF_CHUNK:
                break
            count *= 2
        wanted = (1, count) if count > 1 else (1,)
    return tuple(with_loss_chunks(graph, count) for count in sorted(set(wanted)))
