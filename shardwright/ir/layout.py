"""Meshes, placements and layouts of tensors on devices.

A tensor dimension is a product of *atoms*, major first: GPT-2's fused QKV
output of 2304 is `(3, 12, 64)`. `Atoms` holds the atom sizes of every
dimension of one tensor; a dimension of size one has no atom. A layout shards
whole atoms, so attention heads in the middle of a fused dimension can be split
without any reshuffle of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, NewType

Seconds = NewType("Seconds", float)  # wall time of one optimizer step, or a part of it
Bytes = NewType("Bytes", int)  # on one rank

Atoms = tuple[tuple[int, ...], ...]  # per tensor dimension, the sizes of its atoms


class LayoutError(ValueError):
    """A mesh or layout that cannot exist: wrong text, names or sizes."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the mesh axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Atom `atom` of tensor dimension `dim` is cut into tiles along the mesh axis.

    Tiles are those of `torch.chunk`: `ceil(size / n)` long, the last may be shorter. In `zigzag`
    order device i of n has halves i and 2n − 1 − i of the 2n halves of these tiles, one behind the
    other, as causal attention over a split sequence needs them.
    """

    dim: int
    atom: int = 0
    zigzag: bool = False

    @property
    def contiguous(self) -> Shard:
        """The placement without zigzag order: each tile has neighbouring indices."""
        return Shard(self.dim, self.atom) if self.zigzag else self

    def __str__(self) -> str:
        kind = "Z" if self.zigzag else "S"
        return f"{kind}({self.dim}.{self.atom})" if self.atom else f"{kind}({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The tensor is the sum of what the devices along the mesh axis hold."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
PARTIAL = Partial()


def parse_placement(text: str) -> Placement:
    """Read what `str(placement)` printed.

    >>> parse_placement("S(2.1)")
    Shard(dim=2, atom=1, zigzag=False)
    """
    if text == "R":
        return REPLICATE
    if text == "P":
        return PARTIAL
    found = re.fullmatch(r"([SZ])\((\d+)(?:\.(\d+))?\)", text)
    if found is None:
        raise LayoutError(f"placement {text!r} is none of R, P, S(dim) and S(dim.atom)")
    return Shard(int(found[2]), int(found[3] or 0), found[1] == "Z")


class PipelineAxis(NamedTuple):
    """The pipeline's axis among those of the mesh of one stage.

    Attributes:
        outer: how many axes are outside of it, at least one.
        groups: its size.
    """

    outer: int
    groups: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """A named, logical view of the devices, as `dp=2 tp=4`, outermost axis first.

    Ranks are numbered row-major, so the last axis joins neighbouring ranks.

    Attributes:
        axes: pairs (name, size).
        pipeline: of the devices of a pipeline stage, the axis of the pipeline where it is inside of
            another one, so that ranks of other stages lie between these; else None.
    """

    axes: tuple[tuple[str, int], ...]
    pipeline: PipelineAxis | None = None

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names):
            raise LayoutError(f"mesh axes {names} must have different names")
        for name, size in self.axes:
            if size < 1:
                raise LayoutError(f"mesh axis {name}={size} must be at least 1")

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each axis, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` on every axis.

        >>> Mesh((("dp", 2), ("tp", 4))).coordinate(6)
        (1, 2)
        """
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is outside of mesh {self} of {self.size} devices")
        found = []
        for size in reversed(self.shape):
            found.append(rank % size)
            rank //= size
        return tuple(reversed(found))

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read what `str(mesh)` printed.

        Args:
            text: axes with their sizes, outermost first.

        Raises:
            LayoutError: malformed text, a size below 1, or a name given twice.

        Examples:
            >>> Mesh.parse("dp=2 tp=4").shape
            (2, 4)
        """
        axes = []
        for part in text.split():
            found = re.fullmatch(r"([A-Za-z_]\w*)=(\d+)", part)
            if found is None:
                raise LayoutError(f"mesh {text!r}: {part!r} is not name=size, as in 'dp=2 tp=4'")
            axes.append((found[1], int(found[2])))
        return cls(tuple(axes))


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one tensor on a mesh.

    Two axes may shard the same atom: the outer axis cuts first, the inner one cuts each tile again.

    Attributes:
        mesh: the mesh.
        placements: one `Shard`, `Replicate` or `Partial` per axis of the mesh.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.axes):
            raise LayoutError(
                f"{len(self.placements)} placements for mesh {self.mesh} of"
                f" {len(self.mesh.axes)} axes"
            )

    def __hash__(self) -> int:
        return hash(self.placements)  # cheap; layouts in one table are of few meshes

    @classmethod
    def replicated(cls, mesh: Mesh) -> Layout:
        return cls(mesh, (REPLICATE,) * len(mesh.axes))

    @property
    def is_replicated(self) -> bool:
        return all(isinstance(p, Replicate) for p in self.placements)

    @property
    def contiguous(self) -> Layout:
        """The layout without zigzag order: each tile has neighbouring indices."""
        cuts = (p.contiguous if isinstance(p, Shard) else p for p in self.placements)
        return Layout(self.mesh, tuple(cuts))

    def dual(self) -> Layout:
        """The layout that this tensor's gradient must have: Partial becomes Replicate."""
        dual = tuple(REPLICATE if isinstance(p, Partial) else p for p in self.placements)
        return Layout(self.mesh, dual)

    def __str__(self) -> str:
        named = zip(self.mesh.names, self.placements, strict=True)
        return " ".join(f"{axis}:{p}" for axis, p in named)

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Layout:
        """Read what `str(layout)` printed.

        Args:
            text: axes with their placements, outermost first.
            mesh: the mesh that has these axes.

        Raises:
            LayoutError: malformed text, or other axes than those of the mesh.

        Examples:
            >>> mesh = Mesh.parse("dp=2 tp=4")
            >>> str(Layout.parse("dp:S(0) tp:R", mesh))
            'dp:S(0) tp:R'
        """
        found = dict(part.partition(":")[::2] for part in text.split())
        if tuple(found) != mesh.names:
            raise LayoutError(f"layout {text!r} must name the axes of mesh {mesh}, in order")
        return cls(mesh, tuple(parse_placement(p) for p in found.values()))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of tile `index` when `size` is cut into `parts`, as `torch.chunk` does.

    >>> [chunk(7, 3, i) for i in range(3)]
    [(0, 3), (3, 3), (6, 1)]
    """
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def zigzag_runs(size: int, parts: int, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Starts and lengths of both halves of part `index` when `size` is cut in zigzag order.

    >>> [zigzag_runs(8, 2, i) for i in range(2)]
    [((0, 2), (6, 2)), ((2, 2), (4, 2))]
    """
    early, late = index, 2 * parts - 1 - index
    first, second = (_half(*chunk(size, parts, half // 2), half % 2) for half in (early, late))
    return first, second


def _half(start: int, length: int, late: int) -> tuple[int, int]:
    """The early or the late half of a tile; of an odd number of elements the early one has more."""
    early = -(-length // 2)
    return (start + early, length - early) if late else (start, early)


def part_length(size: int, parts: int, index: int, placement: Shard) -> int:
    """Elements of part `index` when `size` is cut into `parts` as `placement` says."""
    if placement.zigzag:
        return sum(length for _, length in zigzag_runs(size, parts, index))
    return chunk(size, parts, index)[1]


def atom_range(
    size: int, at: tuple[int, int], layout: Layout, coordinate: tuple[int, ...]
) -> range:
    """The indices of one atom, of `size`, that the device at `coordinate` holds.

    `at` is the atom's (dim, atom) position in the tensor that `layout` places, which does not cut
    it in zigzag order.
    """
    start, length = 0, size
    for placement, parts, index in zip(
        layout.placements, layout.mesh.shape, coordinate, strict=True
    ):
        if isinstance(placement, Shard) and (placement.dim, placement.atom) == at:
            offset, length = chunk(length, parts, index)
            start += offset
    return range(start, start + length)


def atom_runs(
    size: int, at: tuple[int, int], layout: Layout, coordinate: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """Starts and lengths of the indices of one atom that a device holds, in its order of them.

    Arguments are those of `atom_range`; axes may cut the atom in zigzag order.

    >>> mesh = Mesh.parse("cp=2 tp=2")
    >>> layout = Layout(mesh, (Shard(0, zigzag=True), Shard(0)))
    >>> atom_runs(8, (0, 0), layout, (0, 1))
    ((6, 2),)
    """
    runs = [(0, size)]
    for placement, parts, index in zip(
        layout.placements, layout.mesh.shape, coordinate, strict=True
    ):
        if isinstance(placement, Shard) and (placement.dim, placement.atom) == at:
            total = sum(length for _, length in runs)
            cut = zigzag_runs if placement.zigzag else _only_chunk
            runs = [run for part in cut(total, parts, index) for run in _within(runs, *part)]
    return tuple(runs)


def _only_chunk(size: int, parts: int, index: int) -> tuple[tuple[int, int], ...]:
    return (chunk(size, parts, index),)


def _within(runs: Sequence[tuple[int, int]], start: int, length: int) -> Iterator[tuple[int, int]]:
    """The runs of `length` elements from `start` on in `runs`, seen as one sequence."""
    for first, size in runs:
        begin, end = max(start, 0), min(start + length, size)
        if begin < end:
            yield first + begin, end - begin
        start -= size


def local_atoms(atoms: Atoms, layout: Layout, coordinate: tuple[int, ...]) -> Atoms:
    """Atom sizes of the tile that the device at `coordinate` holds.

    >>> mesh = Mesh.parse("dp=2 tp=4")
    >>> local_atoms(((8,), (3, 12, 64)), Layout(mesh, (Shard(0), Shard(1, 1))), (0, 3))
    ((4,), (3, 3, 64))
    """
    cut: dict[tuple[int, int], int] = {}
    for placement, parts, index in zip(
        layout.placements, layout.mesh.shape, coordinate, strict=True
    ):
        if isinstance(placement, Shard):
            at = placement.dim, placement.atom
            cut[at] = part_length(cut.get(at, atoms[at[0]][at[1]]), parts, index, placement)
    if not cut:
        return atoms
    return tuple(
        tuple(cut.get((d, a), size) for a, size in enumerate(sizes))
        for d, sizes in enumerate(atoms)
    )


def largest_atoms(atoms: Atoms, layout: Layout) -> Atoms:
    """Atom sizes of the biggest tile (`ceil` at every cut), which is the one at the origin.

    In zigzag order another one may have it, or none.
    """
    if any(isinstance(p, Shard) and p.zigzag for p in layout.placements):
        layout = layout.contiguous
    return local_atoms(atoms, layout, (0,) * len(layout.mesh.axes))


def fits(atoms: Atoms, layout: Layout) -> bool:
    """Whether every placement names an atom and no device would hold an empty tile.

    A tensor without elements is replicated.
    """
    for placement in layout.placements:
        if isinstance(placement, Shard) and not (
            placement.dim < len(atoms)
            and placement.atom < len(atoms[placement.dim])
            and atoms[placement.dim][placement.atom]
        ):
            return False
    last = tuple(size - 1 for size in layout.mesh.shape)
    tiles = zip(atoms, local_atoms(atoms, layout, last), strict=True)
    return all(
        local > 0 or size == 0
        for sizes, locals_ in tiles
        for size, local in zip(sizes, locals_, strict=True)
    )


def is_natural(atoms: Atoms, layout: Layout) -> bool:
    """Whether tiles are those of `torch.chunk` on the tensor's own dimensions, axis by axis.

    Then plain placements on dimensions say the same as placements on atoms, and a tile is one
    block of the tensor: of every dimension leading atoms are sharded first, by outer axes, evenly;
    a later one only where those before it are down to one index, and only the last one unevenly.

    >>> mesh = Mesh.parse("dp=3 tp=4")
    >>> is_natural(((3, 12, 64),), Layout(mesh, (Shard(0), Shard(0, 1))))
    True
    >>> is_natural(((3, 12, 64),), Layout(mesh, (REPLICATE, Shard(0, 1))))
    False
    """
    if not fits(atoms, layout):
        return False
    for dim, sizes in enumerate(atoms):
        at, left = 0, sizes[0] if sizes else 1  # the atom that is being cut, the largest tile of it
        for placement, parts in zip(layout.placements, layout.mesh.shape, strict=True):
            if not isinstance(placement, Shard) or placement.dim != dim or parts == 1:
                continue
            if placement.atom == at + 1 and left == 1:
                at, left = placement.atom, sizes[placement.atom]
            if placement.atom != at or (left % parts and at < len(sizes) - 1):
                return False
            left = -(-left // parts)
    return True


def with_atoms(layout: Layout, atoms: Atoms) -> Layout:
    """A natural layout expressed in other atoms of the same tensor; natural if these allow it.

    >>> mesh = Mesh.parse("dp=3 tp=4")
    >>> str(with_atoms(Layout(mesh, (Shard(0), Shard(0))), ((3, 12, 64),)))
    'dp:S(0) tp:S(0.1)'
    """
    at = [0] * len(atoms)
    left = [sizes[0] if sizes else 1 for sizes in atoms]
    found: list[Placement] = []
    for placement, parts in zip(layout.placements, layout.mesh.shape, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            if left[dim] == 1 and at[dim] + 1 < len(atoms[dim]):
                at[dim] += 1
                left[dim] = atoms[dim][at[dim]]
            left[dim] = -(-left[dim] // parts)
            placement = Shard(dim, at[dim])
        found.append(placement)
    return Layout(layout.mesh, tuple(found))


def shape_of(atoms: Atoms) -> tuple[int, ...]:
    """Tensor shape of these atoms: the product of each dimension's."""
    return tuple(prod(sizes) for sizes in atoms)


def num_elements(atoms: Atoms) -> int:
    """Number of elements of a tensor of these atoms."""
    return prod(shape_of(atoms))
