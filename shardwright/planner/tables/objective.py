"""The objective of a cost table: seconds of a step, or another additive measure.

The search minimises its sum. Bytes of memory are not an objective: every table has them in its
second column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import Tensor
from shardwright.ir.hosts import goes_by_host
from shardwright.ir.layout import Atoms, Mesh
from shardwright.ir.redistribution import Collective, Exchange
from shardwright.machine.model import Machine
from shardwright.machine.topology import Link, hop_links, links
from shardwright.planner.communication.prices import Prices, Routes
from shardwright.planner.tables.layout_codes import Ints
from shardwright.simulate.costs.collectives import charged_part, step_price
from shardwright.simulate.costs.compute import forward_seconds, operator_seconds
from shardwright.simulate.costs.copies import copy_seconds, packing_seconds
from shardwright.simulate.costs.update import update_seconds
from shardwright.simulate.costs.workload import Workload

Floats = NDArray[np.float64]


class TokenHop(NamedTuple):
    """One exchange of tokens with the devices of their experts, forward.

    Attributes:
        devices: how many exchange tokens.
        cost: of all-to-alls of rows there and of results back, by the bytes that the busiest device
            receives in both together: (K,) -> (K,).
    """

    devices: int
    cost: Callable[[Ints], Floats]


class Objective(Protocol):
    """Prices operators, updates of parameters and redistributions."""

    @property
    def redistributes_once(self) -> bool:
        """Whether readers share a redistributed value and keep it for the backward pass.

        If not, every forward and backward operator pays for all values that it reads.
        """

    @property
    def of_parameters(self) -> Objective:
        """The objective for messages of parameters and of their gradients."""

    def operator(self, work: Workload, sizes: Ints, again: bool = False) -> Floats:
        """An operator forward and backward with factors of local `sizes` (factors, K): (K,).

        `again` says that it runs forward once more, in the backward pass.
        """

    def update(self, tile_bytes: Ints, optimizer: str, whole: Tensor) -> Floats:
        """The update of the parameter `whole` with tiles of `tile_bytes`: (K,) -> (K,)."""

    def copies(self, moved: Ints, times: int) -> Floats:
        """Copies of parameters, `times` a step, each of `moved` bytes: (K,) -> (K,)."""

    def packed(self, moved: Ints, handled: int) -> Floats:
        """Packing `handled` tiles into buckets and unpacking them, once: (K,) -> (K,).

        `moved` are the bytes that both copy together, (K,).
        """

    def redistributions(self, atoms: Atoms, item_bytes: int, src: Ints, dst: Ints) -> Floats:
        """Redistributions from each of `src` to that entry of `dst`: codes (N,), (N,) -> (N,)."""

    def token_hops(self, axis: int, chosen: int) -> Sequence[TokenHop]:
        """The exchanges of tokens along an axis, in order, where a token has `chosen` experts."""

    def launches(self, kind: Collective) -> Floats:
        """The cost of a step of `kind` along each mesh axis apart from its size: (axes,)."""

    @property
    def alone_bytes(self) -> int | None:
        """The size from which a parameter gets a message of its own; None for no such size."""


@final
class Duration:
    """Seconds of the lowered program on the devices of `machine`, arranged as `mesh`.

    Of messages `of_weights` only the part counts that operators do not hide.
    """

    redistributes_once = True

    def __init__(
        self,
        machine: Machine,
        mesh: Mesh,
        routes: Routes | None = None,
        *,
        of_weights: bool = False,
    ) -> None:
        self._machine, self._mesh = machine, mesh
        self._ranks = mesh.size
        routes = routes or Routes()
        if of_weights:
            part = partial(charged_part, machine=machine)
            self._prices = Prices(machine, mesh, routes, part)
        else:
            self._prices = Prices(machine, mesh, routes)
        same = of_weights or not machine.most_overlap
        self._of_parameters = self if same else Duration(machine, mesh, routes, of_weights=True)
        # By the ids of workload and sizes (kept alive): seconds of both passes, and of forward.
        self._kernels: dict[tuple[int, int], tuple[Workload, Ints, Floats, Floats]] = {}

    @property
    def of_parameters(self) -> Duration:
        """Seconds that messages of parameters and of their gradients delay a step at least."""
        return self._of_parameters

    def operator(self, work: Workload, sizes: Ints, again: bool = False) -> Floats:
        """Seconds of the kernels."""
        key = id(work), id(sizes)
        if key not in self._kernels:
            forward = forward_seconds(work, sizes, self._machine.device)
            seconds = operator_seconds(work, sizes, self._machine.device, forward)
            self._kernels[key] = work, sizes, seconds, forward
        *_, seconds, forward = self._kernels[key]
        return seconds + forward if again else seconds

    def update(self, tile_bytes: Ints, optimizer: str, whole: Tensor) -> Floats:
        """Seconds of the optimizer's kernels."""
        return update_seconds(tile_bytes, optimizer, self._machine.device, self._ranks, whole)

    def copies(self, moved: Ints, times: int) -> Floats:
        """Seconds of `times` copy kernels."""
        return copy_seconds(moved.astype(np.float64), times, self._machine.device)

    def packed(self, moved: Ints, handled: int) -> Floats:
        """Seconds of one copy kernel, or the measured time to pack where that is longer."""
        return packing_seconds(moved.astype(np.float64), handled, self._machine.device)

    def redistributions(self, atoms: Atoms, item_bytes: int, src: Ints, dst: Ints) -> Floats:
        """Seconds of all steps of each redistribution."""
        return self._prices.seconds(atoms, item_bytes, src, dst)

    def token_hops(self, axis: int, chosen: int) -> Sequence[TokenHop]:
        """Seconds of both all_to_alls, the exchange of counts before them, and sorting of rows."""
        machine, mesh = self._machine, self._mesh
        by_host = goes_by_host(chosen)
        hops = hop_links(machine, mesh)[axis] if by_host else (links(machine, mesh)[axis],)
        return [TokenHop(link.ranks, partial(self._exchanged, link)) for link in hops]

    def _exchanged(self, link: Link, moved: Ints) -> Floats:
        price = step_price(Exchange.ROWS, link, self._machine)
        return price.fixed + price.per_larger * moved.astype(np.float64)

    def launches(self, kind: Collective) -> Floats:
        """Seconds of launch and latency."""
        return self._prices.launches(kind)

    @property
    def alone_bytes(self) -> int | None:
        """The size of the machine's backend."""
        return self._machine.backend_spec.alone_bytes
