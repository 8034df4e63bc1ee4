"""Which meshes a number of devices can be seen as."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.layout import Mesh

_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "sp", "tp")}  # outermost first
AXES = tuple(dict.fromkeys(name for names in _NAMES.values() for name in names))


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
            yield Mesh(tuple(zip(_NAMES[parts], sizes, strict=True)))
