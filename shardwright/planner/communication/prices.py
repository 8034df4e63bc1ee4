"""Prices many redistributions at once, over arrays of layout codes.

The steps of each pair of layouts are those of `redistribution.steps_between`, which tests use as
oracle. They do not depend on the tensor, so they are computed once for all tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.layout import Atoms, Mesh, Partial, Placement, Replicate, Shard
from shardwright.ir.redistribution import INNER_FIRST, KINDS, ORDER, Collective
from shardwright.machine.model import Machine
from shardwright.machine.topology import links
from shardwright.planner.tables.layout_codes import (
    FIRST_ATOM,
    WHOLE,
    Ints,
    digits,
    joined,
    local_elements,
)
from shardwright.simulate.costs.collectives import StepPrice, step_price

Floats = NDArray[np.float64]
# Types of placements: digits, of which 2 and more are shards.
_TYPE: dict[type[Placement], int] = {Replicate: 0, Partial: 1, Shard: 2}
_TYPES = len(_TYPE), len(_TYPE)


class _Step(NamedTuple):
    """One step of some pairs of layouts: indices of the pairs and of layouts of the route."""

    rows: Ints  # (n,)
    before: Ints  # (n,)
    after: Ints  # (n,)
    kind: tuple[Ints, Ints, Ints]  # mesh axis, and the types of placement on both sides, (n,) each


class _Route(NamedTuple):
    """The steps between pairs of layouts, for any tensor."""

    layouts: Ints  # digits, (layouts, axes)
    steps: tuple[_Step, ...]


@final
class Routes:
    """The steps from one layout to another; they depend neither on tensors nor on links."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes, bytes], _Route] = {}
        self._order = np.zeros(_TYPES, np.int64)
        self._inner_first = np.zeros(_TYPES, bool)
        for (src, dst), kind in KINDS.items():
            self._order[_TYPE[src], _TYPE[dst]] = ORDER[kind]
            self._inner_first[_TYPE[src], _TYPE[dst]] = kind in INNER_FIRST

    def between(self, src: Ints, dst: Ints, axes: int) -> _Route:
        """The route from each layout of `src` to that of `dst`: codes (N,), (N,)."""
        key = axes, src.tobytes(), dst.tobytes()
        if key not in self._known:
            self._known[key] = self._made(src, dst, axes)
        return self._known[key]

    def _made(self, src: Ints, dst: Ints, axes: int) -> _Route:
        row = np.flatnonzero(src != dst)
        now, want = digits(src[row], axes), digits(dst[row], axes)
        visited, found = [now], []
        while row.size:
            axis, target = self._next(now, want)
            at = np.arange(len(row))
            types = np.minimum(now[at, axis], 2), np.minimum(target, 2)
            now = now.copy()
            now[at, axis] = target
            visited.append(now)
            found.append((row, (axis, *types)))
            left = np.flatnonzero((now != want).any(axis=1))
            row, now, want = row[left], now[left], want[left]
            visited.append(now)
        codes, number = np.unique(joined(np.concatenate(visited)), return_inverse=True)
        ends = np.cumsum([len(layouts) for layouts in visited])[:-1]
        numbers = np.split(number, ends)
        steps = (
            _Step(rows, before, after, kind)
            for (rows, kind), before, after in zip(found, numbers[::2], numbers[1::2], strict=False)
        )
        return _Route(digits(codes, axes), tuple(steps))

    def _next(self, now: Ints, want: Ints) -> tuple[Ints, Ints]:
        """The axis that changes next and its next digit, for each row."""
        axes = range(now.shape[1])
        pending = now != want
        inner, outer = _blockers(now, want)
        free = pending & ~inner.any(axis=2) & ~outer.any(axis=2)
        types = np.minimum(now, 2), np.minimum(want, 2)
        turn = np.where(self._inner_first[types], list(axes)[::-1], list(axes))
        order = self._order[types] * len(axes) + turn
        axis = np.where(free, order, np.iinfo(np.int64).max).argmin(axis=1)
        target = want[np.arange(len(now)), axis]
        stuck = np.flatnonzero(~free.any(axis=1))
        if stuck.size:  # gather the innermost tile that blocks the others
            blocks = (inner | outer)[stuck] & pending[stuck][:, :, None]
            involved = (pending[stuck] | blocks.any(axis=1)) & (now[stuck] >= FIRST_ATOM)
            axis[stuck] = len(axes) - 1 - involved[:, ::-1].argmax(axis=1)
            target[stuck] = WHOLE
        return axis, target


@final
class Prices:
    """Prices redistributions on the devices of `machine`, arranged as `mesh`.

    Meshes of as many axes may share their `routes`. Prices are multiplied by `part`, by the kind of
    the step.
    """

    def __init__(
        self,
        machine: Machine,
        mesh: Mesh,
        routes: Routes | None = None,
        part: Callable[[Collective], float] = lambda _kind: 1.0,
    ) -> None:
        self._mesh = mesh
        self._routes = routes or Routes()
        self._priced: dict[tuple[bytes, bytes], tuple[_Route, list[Floats]]] = {}
        self._coefficients = np.zeros((len(mesh.axes), *_TYPES, len(StepPrice._fields)))
        for (src, dst), kind in KINDS.items():
            at = _TYPE[src], _TYPE[dst]
            for axis, link in enumerate(links(machine, mesh)):
                price = np.array(step_price(kind, link, machine))
                self._coefficients[(axis, *at)] = part(kind) * price

    def seconds(self, atoms: Atoms, item_bytes: int, src: Ints, dst: Ints) -> Floats:
        """Seconds from each layout of `src` to that of `dst`: codes (N,), (N,) -> (N,)."""
        key = src.tobytes(), dst.tobytes()
        if key not in self._priced:
            found = self._routes.between(src, dst, len(self._mesh.axes))
            self._priced[key] = found, [self._coefficients[step.kind].T for step in found.steps]
        route, prices = self._priced[key]
        size = item_bytes * local_elements(route.layouts, atoms, self._mesh)
        total = np.zeros(len(src))
        for step, (fixed, per_before, per_after, per_larger) in zip(
            route.steps, prices, strict=True
        ):
            before, after = size[step.before], size[step.after]
            moved = per_before * before + per_after * after
            total[step.rows] += fixed + moved + per_larger * np.maximum(before, after)
        return total

    def launches(self, kind: Collective) -> Floats:
        """The size-independent seconds of a step of `kind` along each axis: (axes,)."""
        src, dst = kind.change
        found: Floats = self._coefficients[:, _TYPE[src], _TYPE[dst], 0]
        return found


def _blockers(now: Ints, want: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[row, axis, other]: axes inside and outside of `axis` that must change before it can."""
    axes = np.arange(now.shape[1])
    shard_now, shard_want = now >= FIRST_ATOM, want >= FIRST_ATOM
    own_now, own_want = now[:, :, None], want[:, :, None]
    other_now, other_want = now[:, None, :], want[:, None, :]
    touched = (shard_now[:, :, None] & (other_now == own_now)) | (
        shard_want[:, :, None] & (other_now == own_want)
    )
    inner = touched & (axes[None, :] > axes[:, None])
    changes = (now != want)[:, None, :]
    meets = shard_want[:, :, None] & ((own_want == other_now) | (own_want == other_want))
    outer = changes & meets & (axes[None, :] < axes[:, None])
    return inner, outer
