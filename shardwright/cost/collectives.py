"""Seconds of redistributions, step by step as the lowered program runs them.

Ring algorithms, n devices, S bytes of the whole tensor, B bytes/s and a lap of
n − 1 hops (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009):

* all_gather, reduce_scatter: lap + (n − 1)/n · S / B
* all_reduce, which is one after the other: 2 · lap + 2 · (n − 1)/n · S / B
* all_to_all of tiles of S/n: lap + (n − 1)/n · S/n / B, spread over the levels
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.cost.layouts import local_bytes
from shardwright.cost.topology import Link, links
from shardwright.ir.layout import Atoms, Bytes, Layout, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.redistribution import Collective, Step, steps_between


def collective_seconds(
    kind: Collective, link: Link, before: Bytes, after: Bytes, machine: Machine
) -> Seconds:
    """Seconds of one step that turns local tiles of `before` bytes into tiles of `after` bytes."""
    n, lap = link.ranks, link.lap_seconds
    if n == 1:
        return Seconds(0.0)
    call = machine.collective_launch_seconds
    match kind:
        case Collective.SLICE:
            return memory_pass(2 * after, machine)
        case Collective.MASK:
            return memory_pass(after, machine)
        case Collective.EMBED:
            return memory_pass(before + after, machine)
        case Collective.ALL_REDUCE:
            return Seconds(call + 2 * lap + 2 * (n - 1) / n * before / link.bytes_per_s)
        case Collective.ALL_GATHER:
            return Seconds(call + lap + (n - 1) * before / link.gather_bytes_per_s)
        case Collective.REDUCE_SCATTER:
            if machine.native_reduce_scatter:
                return Seconds(call + lap + (n - 1) * after / link.bytes_per_s)
            whole = collective_seconds(Collective.ALL_REDUCE, link, before, before, machine)
            return Seconds(whole + memory_pass(2 * after, machine))
        case Collective.ALL_TO_ALL:
            if machine.native_all_to_all:
                moved = link.exchange_seconds_per_byte * max(before, after)
                return Seconds(call + lap + moved)
            gathered = Bytes(n * before)
            whole = collective_seconds(Collective.ALL_GATHER, link, before, gathered, machine)
            return Seconds(whole + memory_pass(2 * after, machine))


def memory_pass(moved: int, machine: Machine) -> Seconds:
    """Seconds of one kernel that only reads and writes memory, `moved` bytes in all."""
    device = machine.device
    return Seconds(device.launch_seconds + moved / (device.bytes_per_s * device.efficiency.memory))


def priced_steps(
    atoms: Atoms, item_bytes: int, src: Layout, dst: Layout, machine: Machine
) -> Iterator[tuple[Step, Bytes, Seconds]]:
    """The steps from `src` to `dst`, each with the bytes of its larger tile and its seconds."""
    along = links(machine, src.mesh)
    now = src
    before = local_bytes(atoms, item_bytes, src)
    for step in steps_between(src, dst):
        placements = list(now.placements)
        placements[step.axis] = step.dst
        now = Layout(src.mesh, tuple(placements))
        after = local_bytes(atoms, item_bytes, now)
        link = along[step.axis]
        seconds = collective_seconds(step.collective, link, before, after, machine)
        yield step, max(before, after), seconds
        before = after


def redistribution_seconds(
    atoms: Atoms, item_bytes: int, src: Layout, dst: Layout, machine: Machine
) -> Seconds:
    """Seconds of the whole way from `src` to `dst`; nothing when they are equal."""
    steps = priced_steps(atoms, item_bytes, src, dst, machine)
    return Seconds(sum(seconds for _, _, seconds in steps))
