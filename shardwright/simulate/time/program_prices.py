"""Prices the instructions of a step program, from its plan and the machine.

Seconds of operators and updates are those of the plan. A transfer takes one launch, its bytes on
the links of its mesh axis (`simulate/costs/collectives.py`), and the copies into and out of its
buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import inf, prod

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.ir.layout import Bytes, Mesh, Shard
from shardwright.ir.options.mixed_precision import stored_item_bytes
from shardwright.ir.options.optimizers import optimizer_spec, placed
from shardwright.ir.pipeline import AXIS
from shardwright.ir.plan import Phase, Plan, PlannedParameter, PlannedTransfer
from shardwright.ir.redistribution import LOCAL, Collective, Exchange
from shardwright.machine.model import Machine
from shardwright.machine.topology import contention_of, links
from shardwright.program.instructions import Shape
from shardwright.program.step.channels import axis_of, members
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import Part, Recv, Transfer, after_moves
from shardwright.program.step.lower.purposes import Purpose
from shardwright.simulate.costs.collectives import collective_seconds, hidden_part, step_price
from shardwright.simulate.costs.copies import copy_seconds, packing_seconds
from shardwright.simulate.costs.update import UpdatePrices, state_copy_seconds, update_seconds
from shardwright.simulate.time.async_tensor_parallel import AsyncMessages
from shardwright.simulate.time.step_program import OpSeconds, StepPrices, TransferSeconds
from shardwright.simulate.time.stragglers import at_a_wait

_LOCAL = frozenset(kind.value for kind in LOCAL)


def prices_of(plan: Plan, graph: Graph, machine: Machine) -> StepPrices:
    """The prices of the step programs of `plan`, a plan of `graph` on `machine`."""
    mesh = plan.layout_mesh
    if plan.pipeline is not None:
        return _staged_prices(plan, graph, machine)
    sends = partial(transfer_seconds, mesh=mesh, machine=machine)
    return StepPrices(
        ops=op_seconds(plan, graph, machine),
        transfer=_beside_products(sends, plan, graph, machine),
        hidden=partial(hidden_of, machine=machine),
        links=shared_links(mesh, machine),
        contention=partial(_contention, machine=machine, mesh=mesh),
        late=partial(at_a_wait, machine) if machine.arrival_skew_seconds else None,
        update=_update_prices(plan, graph, machine),
        host_copy=partial(host_copy_seconds, machine=machine),
        host_streams=machine.backend_spec.device != "cpu",
    )


def _update_prices(plan: Plan, graph: Graph, machine: Machine) -> UpdatePrices:
    """The prices of the update of a plan, whose parameters are among those of `graph`."""
    seconds = {parameter.name: parameter.seconds for parameter in plan.parameters}
    launch = optimizer_spec(plan.optimizer).calls * machine.device.launch_seconds
    group = launch if plan.update_group_bytes else 0.0
    name = placed(plan.optimizer, plan.offload)
    spec = optimizer_spec(name)
    if not spec.offload:
        return UpdatePrices(seconds, group)
    trained = [parameter for parameter in plan.parameters if parameter.name in graph.trained]
    tiles = [_tile_bytes(one, graph) for one in trained]
    if spec.by_host:
        given = np.array(tiles, np.int64)
        there, here = (
            update_seconds(given, one, machine.device, plan.devices).tolist()
            for one in (name, plan.optimizer)
        )
        rest = (max(0.0, one.seconds - each) for one, each in zip(trained, here, strict=True))
        found = {  # with casts, which are on the device in any case
            one.name: cast + each for one, cast, each in zip(trained, rest, there, strict=True)
        }
        return UpdatePrices(found)
    sizes = np.array([*tiles, plan.update_group_bytes or 0], np.int64)
    *each, largest = state_copy_seconds(sizes, spec, machine.device).tolist()
    copies = {one.name: copy for one, copy in zip(trained, each, strict=True)}
    return UpdatePrices(seconds, group, copies, largest, machine.backend_spec.device != "cpu")


def _tile_bytes(parameter: PlannedParameter, graph: Graph) -> int:
    """Bytes of the largest tile of a parameter as it is stored."""
    sizes, layout = list(graph.tensor[parameter.name].shape), parameter.layout
    for placement, parts in zip(layout.placements, layout.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // parts)
    return prod(sizes) * stored_item_bytes(graph, parameter.name)


def host_copy_seconds(one: HostCopy, machine: Machine) -> float:
    """Seconds of a copy between a device and its host; infinite if the machine states no rate."""
    rate = machine.device.host_bytes_per_s
    return inf if rate is None else machine.device.launch_seconds + one.bytes / rate


def _staged_prices(plan: Plan, graph: Graph, machine: Machine) -> StepPrices:
    """The prices of the step programs of a plan with pipeline stages."""
    mesh = plan.mesh
    link = links(machine, mesh)[mesh.names.index(AXIS)]

    def transfer(one: Transfer) -> TransferSeconds:
        if axis_of(one.channel) != AXIS:
            return transfer_seconds(one, plan.layout_mesh, machine)
        joined = replace(link, ranks=len(members(one.channel, mesh)))
        size = sum(_bytes(part.sent, part) for part in one.parts)
        return TransferSeconds(step_price(one.collective, joined, machine).seconds(size, size))

    def message(one: Recv) -> float:
        sizes = (prod(part.shape) * ITEM_BYTES[part.dtype] for part in one.payload)
        return step_price(Exchange.MESSAGE, link, machine).seconds(sum(sizes), 0)

    return StepPrices(
        ops=op_seconds(plan, graph, machine),
        transfer=_beside_products(transfer, plan, graph, machine),
        hidden=partial(hidden_of, machine=machine),
        links=shared_links(plan.layout_mesh, machine),
        contention=partial(_contention, machine=machine, mesh=mesh),
        message=message,
        late=partial(at_a_wait, machine) if machine.arrival_skew_seconds else None,
        update=_update_prices(plan, graph, machine),
        host_copy=partial(host_copy_seconds, machine=machine),
        host_streams=machine.backend_spec.device != "cpu",
    )


def _beside_products(
    sends: Callable[[Transfer], TransferSeconds], plan: Plan, graph: Graph, machine: Machine
) -> Callable[[Transfer], TransferSeconds]:
    """Prices of transfers of which those of asynchronous tensor parallelism run beside products.

    What is hidden takes no time of the link either.
    """
    if not plan.async_tp:
        return sends
    messages = AsyncMessages(plan, graph, machine)

    def priced(one: Transfer) -> TransferSeconds:
        found = sends(one)
        if len(one.parts) > 1:
            return found
        beside = messages.of_transfer(one.parts[0].value, one.collective, one.channel)
        return replace(found, link=beside.exposed(found.link))

    return priced


def op_seconds(plan: Plan, graph: Graph, machine: Machine) -> dict[str, OpSeconds]:
    """Seconds of every operator of `graph`, by name, in one micro-batch.

    `graph` may be a part of the plan's graph. Redistributions without communication are added to
    the operator that reads the result, and so are casts of parameters that are not trained. What is
    hidden of messages of experts takes no time of the link either.
    """
    inner, local = seconds_of_transfers(plan, graph)
    each = plan.micro_batches
    for parameter in plan.parameters:
        readers = graph.consumers.get(parameter.name, ())
        if parameter.name not in graph.trained and readers:
            local[readers[0].name, False] += parameter.seconds / each
    if plan.ep_overlap:
        for key in inner.keys() & _exchanges(plan, graph):
            inner[key] = [(axis, (1 - machine.overlap) * each) for axis, each in inner[key]]
    return {
        op.name: OpSeconds(
            op.forward_seconds / each + local.get((op.name, False), 0.0),
            op.backward_seconds / each + local.get((op.name, True), 0.0),
            op.source.module,
            tuple(inner.get((op.name, False), ())),
            tuple(inner.get((op.name, True), ())),
        )
        for op in plan.ops
        if op.name in graph.op
    }


_ByPass = tuple[str, bool]  # an operator, and whether the backward pass


def _exchanges(plan: Plan, graph: Graph) -> set[_ByPass]:
    """The operators that send tokens to experts, in each pass."""
    return {
        (t.consumer, t.phase is Phase.BACKWARD)
        for t in plan.transfers
        if t.collectives[0].startswith(Collective.ALL_TO_ALL.value) and _is_inner(t, graph)
    }


def seconds_of_transfers(
    plan: Plan, graph: Graph
) -> tuple[dict[_ByPass, list[tuple[str, float]]], dict[_ByPass, float]]:
    """Collectives within operators, as `OpSeconds.inner`, and seconds of local moves.

    `graph` may be a part of the plan's graph, whose operators are left out.
    """
    inner: defaultdict[_ByPass, list[tuple[str, float]]] = defaultdict(list)
    local: defaultdict[_ByPass, float] = defaultdict(float)
    for t in plan.transfers:
        if t.consumer not in graph.op:
            continue
        key = t.consumer, t.phase is Phase.BACKWARD
        if _is_inner(t, graph):
            if t.phase is not Phase.RECOMPUTE:  # a repeated run repeats it
                axis = t.collectives[0].split(" ")[1]
                inner[key].append((axis, t.seconds / t.times))
        elif _is_local(t):
            local[key] += t.seconds / t.times
    return inner, local


def runs_by_itself(t: PlannedTransfer, graph: Graph) -> bool:
    """Whether it communicates before its operator, and is no part of the operator's seconds."""
    return not _is_inner(t, graph) and not _is_local(t)


def _is_local(t: PlannedTransfer) -> bool:
    return _are_local(t.collectives)


@cache
def _are_local(collectives: tuple[str, ...]) -> bool:
    return all(one.split(" ")[0] in _LOCAL for one in collectives)


def _is_inner(t: PlannedTransfer, graph: Graph) -> bool:
    """Whether the transfer is within its operator, and not before it."""
    maker = graph.producer.get(t.value)
    return maker is not None and maker.name == t.consumer


def transfer_seconds(one: Transfer, mesh: Mesh, machine: Machine) -> TransferSeconds:
    """Seconds of one transfer, whose parts share a launch and, if several, a buffer."""
    link = links(machine, mesh)[mesh.names.index(axis_of(one.channel))]
    before = sum(_bytes(part.sent, part) for part in one.parts)
    after = sum(_bytes(part.arrived, part) for part in one.parts)
    seconds = step_price(one.collective, link, machine).seconds(before, after)
    fill = sum(_local_seconds(part, mesh, machine) for part in one.parts)
    if len(one.parts) == 1:
        return TransferSeconds(seconds, fill)
    if one.collective.tiled == "src":  # tiles are packed, and gathered copies unpacked
        empty = sum(_packing(part, 2, machine) for part in one.parts)
        return TransferSeconds(seconds, fill, empty)
    if not one.collective.tiled:  # one kernel packs all parts
        return TransferSeconds(seconds, fill + copy_seconds(float(2 * before), 1, machine.device))
    return TransferSeconds(seconds, fill + sum(_packing(part, 1, machine) for part in one.parts))


def _packing(part: Part, handled: int, machine: Machine) -> float:
    """Seconds to put a tensor into a buffer, and with `handled` 2 also to take it out."""
    sent, arrived = _bytes(part.sent, part), _bytes(part.arrived, part)
    moved = 2 * (sent + arrived) if handled == 2 else 2 * sent
    return packing_seconds(float(moved), handled, machine.device)


def _local_seconds(part: Part, mesh: Mesh, machine: Machine) -> float:
    """Seconds of the moves without communication before a transfer.

    A move along no mesh axis cuts out a micro-batch.
    """
    total, shape = 0.0, part.atoms
    for move in part.local:
        after = after_moves(shape, (move,))
        if move.axis in mesh.names:
            axis = links(machine, mesh)[mesh.names.index(move.axis)]
            total += collective_seconds(
                move.collective, axis, _bytes(shape, part), _bytes(after, part), machine
            )
        else:
            total += copy_seconds(float(2 * _bytes(after, part)), 1, machine.device)
        shape = after
    return total


def _bytes(shape: Shape, part: Part) -> Bytes:
    return Bytes(prod(shape) * ITEM_BYTES[part.dtype])


def hidden_of(one: Transfer, purpose: Purpose, machine: Machine) -> float:
    """The fraction of a transfer's time that the machine hides behind operators.

    It is 1 for results, which are scalars.
    """
    if purpose is Purpose.RESULT:
        return 1.0
    if purpose is not Purpose.GRADIENT:
        return machine.soon_overlap
    return hidden_part(one.collective, machine)


def shared_links(mesh: Mesh, machine: Machine) -> Mapping[str, str]:
    """The link of every mesh axis, by name.

    Axes with a contention of 1 are one link, which is named by all of them.
    """
    found: dict[str, str] = {}
    for name in mesh.names:
        shared = [other for other in found if contention_of(machine, mesh, other, name) >= 1]
        found[name] = found[shared[0]] if shared else name
    names = {link: " ".join(n for n in found if found[n] == link) for link in found.values()}
    return {name: names[link] for name, link in found.items()}


def _contention(one: str, other: str, *, machine: Machine, mesh: Mesh) -> float:
    """The fraction of its time by which a transfer on link `one` delays those on link `other`.

    A link is named by its mesh axes or channels, separated by spaces; the largest contention of
    two axes counts.
    """
    pairs = product(map(axis_of, one.split(" ")), map(axis_of, other.split(" ")))
    return max(contention_of(machine, mesh, a, b) for a, b in pairs)
