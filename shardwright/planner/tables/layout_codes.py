"""Encodes layouts as integers, so that thousands are handled as one array.

A search handles hundreds of thousands of layouts, for which Python objects are too slow. A code has
one digit in base `BASE` per mesh axis, the least significant digit for the outermost axis: 0 is
Replicate, 1 is Partial, and 2 + i is Shard of atom i of the tensor, counted over all dimensions. A
code has a meaning only together with the atoms of its tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.gradient_sync import EVERY, LAST
from shardwright.ir.layout import (
    PARTIAL,
    REPLICATE,
    Atoms,
    Layout,
    Mesh,
    Placement,
    Replicate,
    Shard,
)

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WHOLE, SUMS, FIRST_ATOM = 0, 1, 2  # digits: Replicate, Partial, Shard of the first atom
BASE = 64  # exceeds the number of atoms of any tensor, because each has size 2 or more
MOST_AXES = 10  # the most axes whose digits fit into an int64


def digit(placement: Placement, atoms_per_dim: Sequence[int]) -> int:
    """The digit of one placement, on a tensor whose dimensions have so many atoms each.

    >>> digit(Shard(1, 2), (1, 3))
    5
    """
    if isinstance(placement, Shard):
        return FIRST_ATOM + sum(atoms_per_dim[: placement.dim]) + placement.atom
    return WHOLE if isinstance(placement, Replicate) else SUMS


def encode(layout: Layout, atoms: Atoms) -> int:
    """The code of `layout` for a tensor of `atoms`."""
    counts = [len(sizes) for sizes in atoms]
    return sum(digit(p, counts) * BASE**axis for axis, p in enumerate(layout.placements))


def decode(code: int, atoms: Atoms, mesh: Mesh) -> Layout:
    """The layout that `encode` gave `code`."""
    shards = [Shard(d, a) for d, sizes in enumerate(atoms) for a in range(len(sizes))]
    known: list[Placement] = [REPLICATE, PARTIAL, *shards]
    placements: list[Placement] = []
    for _ in mesh.axes:
        code, found = divmod(code, BASE)
        placements.append(known[found])
    return Layout(mesh, tuple(placements))


def digits(codes: Ints, axes: int) -> Ints:
    """One digit per mesh axis: (...) -> (..., axes)."""
    found: Ints = codes[..., None] // BASE ** np.arange(axes) % BASE
    return found


def joined(by_axis: Ints) -> Ints:
    """Codes of digits: (..., axes) -> (...)."""
    found: Ints = (by_axis * BASE ** np.arange(by_axis.shape[-1])).sum(axis=-1)
    return found


def duals(codes: Ints, axes: int) -> Ints:
    """The codes of the layouts of gradients: Partial becomes Replicate."""
    found = digits(codes, axes)
    return joined(np.where(found == SUMS, WHOLE, found))


def summed_gradients(stored: Ints, grads: Ints, axes: int, sync: str | None = None) -> Ints:
    """The layouts in which a parameter's gradient is accumulated: (S,), (T,) -> (S, T).

    They equal the `stored` layouts, except along axes on which the parameter is replicated and the
    gradient (layout `grads`) is not: there they are Partial. `sync` is as in `Plan.gradient_sync`.
    """
    stored_digits, grad_digits = digits(stored, axes)[:, None], digits(grads, axes)[None, :]
    if sync == EVERY:
        terms = np.zeros(np.broadcast_shapes(stored_digits.shape, grad_digits.shape), bool)
    else:
        terms = (stored_digits == WHOLE) & (grad_digits != WHOLE)
    if sync == LAST:
        terms = terms | (grad_digits == SUMS)
    return joined(np.where(terms, SUMS, stored_digits))


def local_elements(by_axis: Ints, atoms: Atoms, mesh: Mesh) -> Ints:
    """Elements of the largest tile, `ceil` at every cut: digits (..., axes) -> (...)."""
    total = np.ones(by_axis.shape[:-1], np.int64)
    for i, size in enumerate(size for sizes in atoms for size in sizes):
        tile = np.full(total.shape, size)
        for axis, parts in enumerate(mesh.shape):
            tile = np.where(by_axis[..., axis] == FIRST_ATOM + i, -(-tile // parts), tile)
        total *= tile
    return total


def storable(atoms: Atoms, mesh: Mesh, only: Sequence[Collection[int]] | None = None) -> Ints:
    """Codes of all layouts in which a parameter of `atoms` may be stored.

    They have no partial sums, give every device a non-empty tile and are natural (`ir/layout.py`),
    so that parameters have the model's shape. `only` are the digits that are allowed along each
    axis. The replicated layout, if allowed, comes first.
    """
    every = layouts_of(atoms, mesh, only)
    by_axis = digits(every, len(mesh.axes))
    found: Ints = every[(by_axis != SUMS).all(axis=1) & _natural(by_axis, atoms, mesh)]
    return found


def _natural(by_axis: Ints, atoms: Atoms, mesh: Mesh) -> Bools:
    """As `is_natural` in `ir/layout.py`, of layouts that fit: digits (N, axes) -> (N,)."""
    good = np.ones(len(by_axis), bool)
    first = FIRST_ATOM
    for sizes in atoms:
        sized = np.array([*sizes, 1])
        at = np.zeros(len(by_axis), np.int64)  # the atom that is being cut
        left = np.full(len(by_axis), sized[0])  # the largest tile of it
        for axis, parts in enumerate(mesh.shape):
            atom = by_axis[:, axis] - first
            here = (atom >= 0) & (atom < len(sizes)) & (parts > 1)
            onward = here & (atom == at + 1) & (left == 1)
            at = np.where(onward, atom, at)
            left = np.where(onward, sized[at], left)
            uneven = (left % parts != 0) & (at < len(sizes) - 1)
            good &= ~here | ((atom == at) & ~uneven)
            left = np.where(here, -(-left // parts), left)
        first += len(sizes)
    return good


def layouts_of(atoms: Atoms, mesh: Mesh, only: Sequence[Collection[int]] | None = None) -> Ints:
    """Codes of all layouts that give every device a non-empty tile, the replicated one first.

    `only` are the digits that are allowed along each axis; it is ignored for axes of size 1.
    """
    flat = [size for sizes in atoms for size in sizes]
    every = range(FIRST_ATOM + len(flat))
    per_axis: list[Sequence[int]] = [every if size > 1 else (WHOLE,) for size in mesh.shape]
    if only is not None:
        per_axis = [
            [found for found in known if size == 1 or found in left]
            for known, left, size in zip(per_axis, only, mesh.shape, strict=True)
        ]
    by_axis = np.array(list(product(*per_axis)), np.int64).reshape(-1, len(mesh.axes))
    good = np.ones(len(by_axis), bool)
    for i, size in enumerate(flat):
        last = np.full(len(by_axis), size)
        for axis, parts in enumerate(mesh.shape):
            last = np.where(by_axis[:, axis] == FIRST_ATOM + i, last_tile(last, parts), last)
        good &= (last > 0) | (size == 0)
    return joined(by_axis[good])


def most_layouts(atoms: Atoms, mesh: Mesh) -> int:
    """The number of layouts, feasible or not."""
    choices = FIRST_ATOM + sum(len(sizes) for sizes in atoms)
    return prod(choices for size in mesh.shape if size > 1)


def last_tile(sizes: Ints, parts: int) -> Ints:
    """Length of the last of `parts` tiles, cut as `torch.chunk` cuts."""
    found: Ints = np.maximum(sizes - (parts - 1) * -(-sizes // parts), 0)
    return found
