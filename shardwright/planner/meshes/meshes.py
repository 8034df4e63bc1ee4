"""Enumerates the meshes of a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.ir.layout import Mesh
from shardwright.machine.model import Machine

# Names of axes that may do anything, outermost first, until a plan shows what they do.
_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp"), 4: ("dp", "ep", "sp", "tp")}


def factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as an ordered product of `parts` factors of at least two.

    >>> list(factorisations(12, 2))
    [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    if parts == 1:
        yield from [(number,)] if number > 1 else []
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, parts - 1))


def meshes_of(devices: int, axes: int = 2) -> Iterator[Mesh]:
    """Every mesh of up to `axes` axes over `devices`; the last axis is on the fastest links.

    >>> [str(mesh) for mesh in meshes_of(4)]
    ['dp=4', 'dp=2 tp=2']
    """
    if devices == 1:
        yield Mesh((("dp", 1),))
    for parts in range(1, axes + 1):
        for sizes in factorisations(devices, parts):
            yield mesh_of_shape(sizes)


def mesh_of_shape(sizes: Sequence[int]) -> Mesh:
    """The mesh of up to four axes of these sizes, which may do anything.

    >>> str(mesh_of_shape((4, 2, 8)))
    'dp=4 sp=2 tp=8'
    """
    return Mesh(tuple(zip(_NAMES[len(sizes)], sizes, strict=True)))


def mesh_of_cuts(machine: Machine) -> Mesh:
    """The mesh of all devices whose axes are cuts into a prime number of parts each.

    The outermost level of links is cut first, and of one level the largest prime.

    >>> from shardwright.machine.presets import preset
    >>> str(mesh_of_cuts(preset("2x6xA100")))
    'k1=2 k2=3 k3=2'
    """
    levels = (primes(level.size) for level in reversed(machine.levels))
    parts = [prime for level in levels for prime in reversed(level)] or [1]
    return Mesh(tuple((f"k{i}", size) for i, size in enumerate(parts, start=1)))


def primes(number: int) -> list[int]:
    """The prime factors of `number`, smallest first.

    >>> primes(12)
    [2, 2, 3]
    """
    found, prime = [], 2
    while number > 1:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found
