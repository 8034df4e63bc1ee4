"""Seconds of redistributions, step by step as the lowered program runs them.

Ring algorithms, n devices, S bytes of the whole tensor, B bytes/s and a lap of
n − 1 hops (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009):

* all_gather, reduce_scatter: lap + (n − 1)/n · S / B
* all_reduce, which is one after the other: 2 · lap + 2 · (n − 1)/n · S / B
* all_to_all of tiles of S/n: lap + (n − 1)/n · S/n / B, spread over the levels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.layout import Atoms, Bytes, Layout, Seconds
from shardwright.ir.redistribution import ByCollective, Collective, Step, steps_between
from shardwright.machine.model import Machine
from shardwright.machine.topology import Link, links
from shardwright.simulate.costs.layouts import local_bytes

Amount = TypeVar("Amount", float, NDArray[np.float64])


class StepPrice(NamedTuple):
    """Seconds of a step: fixed, and per byte of its tile before, of that after, of the larger."""

    fixed: float
    per_before: float = 0.0
    per_after: float = 0.0
    per_larger: float = 0.0

    def seconds(self, before: int, after: int) -> Seconds:
        """Seconds of a step from tiles of `before` bytes to tiles of `after` bytes."""
        moved = self.per_before * before + self.per_after * after
        return Seconds(self.fixed + moved + self.per_larger * max(before, after))

    def and_then(self, other: StepPrice) -> StepPrice:
        return StepPrice(*(a + b for a, b in zip(self, other, strict=True)))


@cache
def step_price(kind: Collective, link: Link, machine: Machine) -> StepPrice:
    """What a step of `kind` costs on the devices that `link` joins."""
    price = _PRICES[kind]
    return StepPrice(0.0) if link.ranks == 1 else price(link, machine)


def _slice(_link: Link, machine: Machine) -> StepPrice:
    return StepPrice(machine.device.launch_seconds, per_after=2 * _touch(machine))


def _mask(_link: Link, machine: Machine) -> StepPrice:
    return StepPrice(machine.device.launch_seconds, per_after=_touch(machine))


def _embed(_link: Link, machine: Machine) -> StepPrice:
    touch = _touch(machine)
    return StepPrice(machine.device.launch_seconds, per_before=touch, per_after=touch)


def _all_reduce(link: Link, machine: Machine) -> StepPrice:
    call, n, per_byte = machine.collective_launch_seconds, link.ranks, 1 / link.bytes_per_s
    return StepPrice(call + 2 * link.lap_seconds, per_before=2 * (n - 1) / n * per_byte)


def _all_gather(link: Link, machine: Machine) -> StepPrice:
    fixed = machine.collective_launch_seconds + link.lap_seconds
    return StepPrice(fixed, per_before=(link.ranks - 1) / link.gather_bytes_per_s)


def _reduce_scatter(link: Link, machine: Machine) -> StepPrice:
    if not machine.backend_spec.native_reduce_scatter:
        return _all_reduce(link, machine).and_then(_slice(link, machine))
    fixed, per_byte = machine.collective_launch_seconds + link.lap_seconds, 1 / link.bytes_per_s
    return StepPrice(fixed, per_after=(link.ranks - 1) * per_byte)


def _all_to_all(link: Link, machine: Machine) -> StepPrice:
    fixed = machine.collective_launch_seconds + link.lap_seconds
    return StepPrice(fixed, per_larger=link.exchange_seconds_per_byte)


_PRICES = ByCollective[Callable[[Link, Machine], StepPrice]](
    "that has a price",
    {
        Collective.SLICE: _slice,
        Collective.MASK: _mask,
        Collective.EMBED: _embed,
        Collective.REDUCE_SCATTER: _reduce_scatter,
        Collective.ALL_TO_ALL: _all_to_all,
        Collective.ALL_REDUCE: _all_reduce,
        Collective.ALL_GATHER: _all_gather,
    },
)

_SORTING = 12  # kernels that put rows in order, and back, on both sides of an exchange


@cache
def exchange_price(link: Link, machine: Machine) -> StepPrice:
    """What rows cost that are sent where the data says, and their results sent back.

    Counts are gathered first, then come two all_to_alls, per byte of both that the
    busiest device is sent. Every row is sorted before it leaves and after it has come.
    """
    if link.ranks == 1:
        return StepPrice(0.0)
    calls = 3 * (machine.collective_launch_seconds + link.lap_seconds)
    launches = _SORTING * machine.device.launch_seconds
    sorting = 4 / _memory_bytes_per_s(machine)
    return StepPrice(calls + launches, per_larger=link.exchange_seconds_per_byte + sorting)


def message_seconds(size: Amount, link: Link, machine: Machine) -> Amount:
    """Seconds of messages of `size` bytes from one device to the next along `link`."""
    per_hop = link.lap_seconds / max(1, link.ranks - 1)
    call = machine.collective_launch_seconds + per_hop
    return (size > 0) * call + size / link.bytes_per_s


def collective_seconds(
    kind: Collective, link: Link, before: Bytes, after: Bytes, machine: Machine
) -> Seconds:
    """Seconds of one step that turns local tiles of `before` bytes into tiles of `after` bytes."""
    return step_price(kind, link, machine).seconds(before, after)


def _touch(machine: Machine) -> float:
    """Seconds in which a byte of memory is read or written."""
    return 1 / _memory_bytes_per_s(machine)


def _memory_bytes_per_s(machine: Machine) -> float:
    return machine.device.bytes_per_s * machine.device.efficiency.streaming


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
