"""Seconds of redistributions, the sum of the steps that the lowered program runs.

Ring algorithms with n devices, S bytes of the whole tensor, B bytes/s, and the latency of n − 1
hops, a lap (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009):

* all_gather, reduce_scatter: lap + (n − 1)/n · S / B
* all_reduce, a reduce_scatter and then an all_gather: 2 · lap + 2 · (n − 1)/n · S / B
* all_to_all of tiles of S/n: lap + (n − 1)/n · S/n / B, with the bytes divided among the levels

Each also has the seconds of a launch. All-gathers may have a bandwidth of their own, which
scattered sums have, too, where a rank adds up their terms itself (`BackendSpec.receives_terms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from shardwright.ir.layout import Atoms, Bytes, Layout, Seconds
from shardwright.ir.redistribution import (
    LOCAL,
    ByKind,
    Collective,
    CommKind,
    Exchange,
    PlacementChange,
    steps_between,
)
from shardwright.machine.model import Machine
from shardwright.machine.topology import Link, links
from shardwright.simulate.costs.tile_sizes import local_bytes


class StepPrice(NamedTuple):
    """Seconds of a step: fixed, and per byte of the tile before, the tile after, the larger one."""

    fixed: float
    per_before: float = 0.0
    per_after: float = 0.0
    per_larger: float = 0.0

    def seconds(self, before: int, after: int) -> Seconds:
        """Seconds of a step from tiles of `before` bytes to tiles of `after` bytes."""
        moved = self.per_before * before + self.per_after * after
        return Seconds(self.fixed + moved + self.per_larger * max(before, after))


def hidden_part(kind: CommKind, machine: Machine) -> float:
    """The fraction of a message of parameters or their gradients that operators hide.

    Moves within a device are operators themselves.
    """
    if kind in LOCAL:
        return 0.0
    return machine.overlap if kind is Collective.ALL_REDUCE else machine.soon_overlap


def charged_part(kind: CommKind, machine: Machine) -> float:
    """The fraction of such a message that tables charge: what operators do not hide, or all of it.

    See `planner/settle.py`.
    """
    return 1.0 if machine.charges_hidden else 1.0 - hidden_part(kind, machine)


@cache
def step_price(kind: CommKind, link: Link, machine: Machine) -> StepPrice:
    """The price of a step of `kind` among the devices of `link`; 0 for a single device."""
    price = PRICES[kind]
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
    fixed, per_byte = machine.collective_launch_seconds + link.lap_seconds, 1 / link.bytes_per_s
    if machine.backend_spec.receives_terms:  # by messages, as gathers, and then sums of two each
        per_byte = 1 / link.gather_bytes_per_s + 3 * _touch(machine)
    return StepPrice(fixed, per_after=(link.ranks - 1) * per_byte)


def _all_to_all(link: Link, machine: Machine) -> StepPrice:
    fixed = machine.collective_launch_seconds + link.lap_seconds
    return StepPrice(fixed, per_larger=link.exchange_seconds_per_byte)


def _message(link: Link, machine: Machine) -> StepPrice:
    """The price of one message to a neighbour, by its bytes."""
    return StepPrice(_hop(link, machine), per_before=1 / link.bytes_per_s)


def _swap(link: Link, machine: Machine) -> StepPrice:
    """The price of halves of tiles sent to other devices (zigzag), by the bytes of a tile."""
    per_byte = link.exchange_seconds_per_byte * link.ranks / (link.ranks - 1)
    return StepPrice(_hop(link, machine), per_before=per_byte)


def _rows(link: Link, machine: Machine) -> StepPrice:
    """The price of rows sent to the devices of their experts and results sent back, by their bytes.

    The bytes are those of the busiest device. Numbers of rows are gathered first, then there are
    two all-to-alls. Rows are put in order before and after each.
    """
    calls = _CALLS_OF_ROWS * (machine.collective_launch_seconds + link.lap_seconds)
    launches = _SORTING * machine.device.launch_seconds
    sorting = 4 / _memory_bytes_per_s(machine)
    return StepPrice(calls + launches, per_larger=link.exchange_seconds_per_byte + sorting)


def _hop(link: Link, machine: Machine) -> float:
    """Seconds of the launch and the latency of one message."""
    return machine.collective_launch_seconds + link.lap_seconds / (link.ranks - 1)


_CALLS_OF_ROWS = 3  # numbers of rows, rows with their scores, results
_SORTING = 12  # kernels that put rows in order and back, on both sides
PRICES = ByKind[Callable[[Link, Machine], StepPrice]](
    "that has a price",
    {
        Collective.SLICE: _slice,
        Collective.MASK: _mask,
        Collective.EMBED: _embed,
        Collective.REDUCE_SCATTER: _reduce_scatter,
        Collective.ALL_TO_ALL: _all_to_all,
        Collective.SWAP: _swap,
        Collective.SWAP_BACK: _swap,
        Collective.ALL_REDUCE: _all_reduce,
        Collective.ALL_GATHER: _all_gather,
        Exchange.RING: _message,
        Exchange.ROWS: _rows,
        Exchange.MESSAGE: _message,
    },
)


def collective_seconds(
    kind: CommKind, link: Link, before: Bytes, after: Bytes, machine: Machine
) -> Seconds:
    """Seconds of one step from local tiles of `before` bytes to tiles of `after` bytes."""
    return step_price(kind, link, machine).seconds(before, after)


def _touch(machine: Machine) -> float:
    """Seconds to read or write a byte of memory."""
    return 1 / _memory_bytes_per_s(machine)


def _memory_bytes_per_s(machine: Machine) -> float:
    return machine.device.bytes_per_s * machine.device.efficiency.streaming


def priced_steps(
    atoms: Atoms, item_bytes: int, src: Layout, dst: Layout, machine: Machine
) -> Iterator[tuple[PlacementChange, Bytes, Seconds]]:
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
