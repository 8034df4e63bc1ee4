"""SoyBean's measure of a tiling: the bytes that all devices together receive in one step.

Paper: SoyBean (arXiv 1805.04170), conversion costs between tilings and the k-cut recursion. Of a
tensor of S bytes, a cut into p parts moves

    row or column -> the other     (p - 1)/p · S     (two halves: S/2)
    row or column -> replicated    (p - 1) · S       (S)
    partial sums  -> row, column   (p - 1) · S       (S)
    partial sums  -> replicated    2 (p - 1) · S     (2 S)
    replicated    -> anything      0

If earlier cuts divided the n devices into g groups, each group moves that many bytes of its own
tensor, so the total is the sum of g · c over the cuts. Forward operators, backward operators and
gradients of parameters count; arithmetic, memory, latency and bandwidth do not. Pure data
parallelism over n devices costs 2 (n - 1) |W| for every factorisation of n.

Deviations: any number of parts, and tiles of different sizes. As the tiles of a cut make up the
whole tensor, all conversions except row -> column remain exact for them. If an earlier cut also
converts the tensor, sums are reduced before that conversion and tiles gathered after it, so that
the cuts add up to the bytes that n devices must receive. Scalars are omitted, because the paper's
graph has none. Operands may be partial sums (a bias if a reduction is split), at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import Tensor
from shardwright.ir.layout import Atoms, Mesh, Partial, Placement, Replicate, Shard
from shardwright.ir.redistribution import KINDS, Collective, CrossingParts
from shardwright.planner.tables.layout_codes import FIRST_ATOM, WHOLE, Ints, digits
from shardwright.planner.tables.objective import TokenHop
from shardwright.simulate.costs.workload import Workload

Floats = NDArray[np.float64]


@final
class Communication:
    """SoyBean's measure on `mesh`, whose axes are the cuts, the outermost first."""

    redistributes_once = False  # in the paper's graph every operator converts what it reads

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        types: tuple[type[Placement], ...] = (Replicate, Partial, Shard)  # as digits cut off at 2
        self._moved = np.zeros((len(mesh.axes), 3, 3, len(CrossingParts._fields)))
        for axis, parts in enumerate(mesh.shape):
            for (src, dst), kind in KINDS.items():
                self._moved[axis, types.index(src), types.index(dst)] = kind.crossing(parts)

    @property
    def of_parameters(self) -> Communication:
        """The measure of parameters, which is that of all tensors."""
        return self

    def operator(self, work: Workload, sizes: Ints, again: bool = False) -> Floats:
        """Nothing: aligned operators communicate nothing."""
        return np.zeros(sizes.shape[1])

    def update(self, tile_bytes: Ints, optimizer: str, whole: Tensor) -> Floats:
        """Nothing: a parameter and its gradient have one tiling."""
        return np.zeros(tile_bytes.shape)

    def copies(self, moved: Ints, times: int) -> Floats:
        """Nothing: no bytes between devices."""
        return np.zeros(moved.shape)

    def packed(self, moved: Ints, handled: int) -> Floats:
        """Nothing: no bytes between devices."""
        return np.zeros(moved.shape)

    def token_hops(self, axis: int, chosen: int) -> Sequence[TokenHop]:
        """Bytes that leave their device, over all devices."""
        del chosen  # tokens go along an axis at once
        parts, size = self._mesh.shape[axis], self._mesh.size
        return [TokenHop(parts, lambda moved: moved * (parts - 1) / parts * size)]

    def launches(self, kind: Collective) -> Floats:
        """Nothing: latency does not count."""
        return np.zeros(len(self._mesh.axes))

    @property
    def alone_bytes(self) -> int | None:
        """None: neither launches nor copies on a device count."""
        return None

    def redistributions(self, atoms: Atoms, item_bytes: int, src: Ints, dst: Ints) -> Floats:
        """Bytes that cross all cuts."""
        total = np.zeros(len(src))
        if not atoms:
            return total
        now, want = (digits(codes, len(self._mesh.axes)) for codes in (src, dst))
        sliced = (now == WHOLE) & (want >= FIRST_ATOM)  # free, so it comes first
        before = after = np.ones(len(src))  # copies in all groups after the earlier cuts
        for axis, parts in enumerate(self._mesh.shape):
            source, target = now[:, axis], want[:, axis]
            types = np.minimum(source, 2), np.minimum(target, 2)
            per_before, per_after, per_smaller = self._moved[axis, *types].T
            crossing = per_before * before + per_after * after
            crossing += per_smaller * np.minimum(before, after)
            total += np.where(source == target, 0.0, crossing)
            before = np.where((source >= FIRST_ATOM) | sliced[:, axis], before, before * parts)
            after = np.where(target >= FIRST_ATOM, after, after * parts)
        return total * item_bytes * prod(size for sizes in atoms for size in sizes)
