"""Unifies dimensions over a graph and refines them into atoms.

Every operator's notation says that dimensions of its operands and results are
equal, or products of each other. Solving these equations over the whole graph,
as a type checker would, refines each dimension into atoms: the 2304 outputs of
a fused projection become (3, 12, 64) because a later `split` and `view` say so.

Plain equalities are solved first, so that a reshape that contradicts them affects only its own
operator, which then does not split the dimension. The solution is checked operator by operator, so
a missing or unsolvable equation may remove choices but never makes a rule wrong.

Complexity: nearly linear in the number of dimensions (union-find).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import final

from shardwright.ir.graph import Graph
from shardwright.rules.notation import Notation
from shardwright.rules.rule import SPREAD, Dims, Factor, FactorKind, Rule


class Dim:
    """A dimension in the union-find forest: a leaf is an atom, others are products of parts."""

    __slots__ = ("parent", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parent: Dim | None = None
        self.parts: tuple[Dim, ...] = ()

    def find(self) -> Dim:
        root = self
        while root.parent is not None:
            root = root.parent
        node = self
        while node.parent is not None:
            node.parent, node = root, node.parent
        return root

    def atoms(self) -> list[Dim]:
        root = self.find()
        if not root.parts:
            return [root]
        return [atom for part in root.parts for atom in part.atoms()]


def equate(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Make two products of dimensions equal, refining both into common atoms.

    Returns False when their boundaries do not form one chain of divisors
    (6 = 2·3 = 3·2); a refinement made before that is harmless.
    """
    if len(left) == len(right) == 1:  # nearly all equations
        one, other = left[0].find(), right[0].find()
        if one is other:
            return True
        if one.size == other.size and not (one.parts or other.parts):
            other.parent = one
            return True
    while True:
        a = [atom for dim in left for atom in dim.atoms()]
        b = [atom for dim in right for atom in dim.atoms()]
        if [dim.size for dim in a] == [dim.size for dim in b]:
            break
        bounds = sorted({*_bounds(a), *_bounds(b)})
        if any(large % small for small, large in pairwise(bounds)):
            return False
        if not (_refine(a, bounds) or _refine(b, bounds)):
            return False
    for one, other in zip(a, b, strict=True):
        one, other = one.find(), other.find()
        if one is not other and not one.parts and not other.parts:
            other.parent = one
    return [d.find() for d in a] == [d.find() for d in b]


def _bounds(atoms: Sequence[Dim]) -> list[int]:
    """Products of the last 0, 1, ... atoms."""
    found = [1]
    for atom in reversed(atoms):
        found.append(found[-1] * atom.size)
    return found


def _refine(atoms: Sequence[Dim], bounds: Sequence[int]) -> bool:
    """Split the first atom, from the minor side, that contains a boundary; False if none does."""
    low = 1
    for atom in reversed(atoms):
        high = low * atom.size
        inside = [b for b in bounds if low < b < high]
        if inside:
            edges = [low, *inside, high]
            parts = [Dim(b // a) for a, b in pairwise(edges)]
            atom.parts = tuple(reversed(parts))
            return True
        low = high
    return False


_SHARED = "other operators arrange its dimensions in another way"
_ALL = "it needs all of every dimension"


@dataclass(frozen=True)
class Unified:
    """The `Dim`s of every value (None where the size is one) and of every operator's indices."""

    values: Mapping[str, tuple[Dim | None, ...]]
    indices: Mapping[str, Mapping[str, Dim]]


def unify(graph: Graph, notations: Mapping[str, Notation]) -> Unified:
    """Solve the equations of `notations`, a notation by operator name."""
    values = {
        value.name: tuple(Dim(size) if size != 1 else None for size in value.shape)
        for value in graph.values
    }
    indices: dict[str, dict[str, Dim]] = {}
    equations: list[tuple[Dim, list[Dim]]] = []
    for op in graph.ops:
        if op.name not in notations:
            continue
        notation = notations[op.name]
        mine = indices[op.name] = {name: Dim(size) for name, size in notation.sizes.items()}
        names_of = (*notation.operands, *notation.results)
        for value, spelled in zip((*op.operands, *op.outputs), names_of, strict=True):
            for dim, names in zip(values[value], spelled, strict=True):
                if dim is not None and names:
                    equations.append((dim, [mine[name] for name in names]))
    for dim, parts in sorted(equations, key=lambda equation: len(equation[1]) > 1):
        equate([dim], parts)
    return Unified(values, indices)


def refine_rule(
    notation: Notation,
    indices: Mapping[str, Dim],
    values: Sequence[Sequence[list[Dim]]],
    atom_ids: Mapping[Dim, int],
) -> Rule:
    """The rule of one operator at the atoms' resolution.

    `values` has the atoms of every dimension of its operands and then of its results (no atoms for
    size 1), and `atom_ids` the ids of atoms. If notation and atoms disagree, because an equation
    could not be solved, these atoms and all indices involved are not split.
    """
    atoms = {name: dim.atoms() for name, dim in indices.items()}
    names_of = (*notation.operands, *notation.results)
    matches = [
        [
            not dim or [a for n in names for a in atoms[n]] == dim
            for dim, names in zip(value, spelled, strict=True)
        ]
        for value, spelled in zip(values, names_of, strict=True)
    ]
    broken = _broken(names_of, matches)
    factors = _Factors(atoms, {*notation.whole, *broken}, atom_ids)
    dims = [
        factors.dims(f"v{v}", value, spelled, matches[v])
        for v, (value, spelled) in enumerate(zip(values, names_of, strict=True))
    ]
    work = factors.labels(notation.work)
    internal_reductions = tuple(
        tuple(factors.labels(names) for names in one) for one in notation.internal_reductions
    )
    routes = factors.routes(notation, indices)
    if routes:
        factors.found[SPREAD] = Factor(SPREAD, 1, FactorKind.WHOLE)
        work = (*work, SPREAD)
    single = {name for name in atoms if len(atoms[name]) == 1} - broken
    joint_splits = _joint_splits(notation, single)
    for name in {name for names in joint_splits for name in names}:
        factors.index(name)
    count = len(notation.operands)
    return Rule(
        factors=tuple(factors.found.values()),
        operands=tuple(dims[:count]),
        results=tuple(dims[count:]),
        additive=notation.additive,
        linear=notation.linear,
        work=work,
        work_repeats=notation.work_repeats,
        internal_reductions=internal_reductions,
        routes=routes,
        joint_splits=joint_splits,
        reason=_SHARED if broken else notation.reason or (_ALL if notation.whole else ""),
    )


@final
class _Factors:
    """The factors of one rule, in the order in which its dimensions need them.

    Indices of `whole` are not split.
    """

    def __init__(
        self, atoms: Mapping[str, list[Dim]], whole: Collection[str], atom_ids: Mapping[Dim, int]
    ) -> None:
        self.found: dict[str, Factor] = {}
        self._atoms, self._whole, self._atom_ids = atoms, whole, atom_ids
        self._labels: dict[str, tuple[str, ...]] = {}  # of indices, once they are factors

    def index(self, name: str) -> tuple[str, ...]:
        """The factors of an index, one for each of its atoms."""
        if name not in self._labels:
            kind = FactorKind.WHOLE if name in self._whole else FactorKind.PARALLEL
            self._labels[name] = self._add(name, self._atoms[name], kind)
        return self._labels[name]

    def labels(self, names: Sequence[str]) -> tuple[str, ...]:
        """The factors of several indices."""
        return tuple([label for name in names for label in self.index(name)])

    def dims(
        self,
        value: str,
        atoms: Sequence[list[Dim]],
        spelled: Sequence[Sequence[str]],
        matches: Sequence[bool],
    ) -> Dims:
        """The factors of each dimension of a value; not splittable where atoms do not match."""
        found: list[tuple[str, ...]] = []
        for d, (dim, names) in enumerate(zip(atoms, spelled, strict=True)):
            if not dim:
                found.append(())
            elif not matches[d]:
                found.append(self._add(f"{value}d{d}", dim, FactorKind.WHOLE))
            elif len(names) == 1:
                found.append(self.index(names[0]))
            else:
                found.append(self.labels(names))
        return tuple(found)

    def routes(self, notation: Notation, indices: Mapping[str, Dim]) -> tuple[tuple[str, str], ...]:
        """Pairs of factors that are split together, of rows and of the one that owns them."""
        return tuple(
            (rows, owner)
            for pair in notation.routes
            if set(pair) <= set(indices) and len(self._atoms[pair[1]]) == 1
            for rows, owner in product(*map(self.index, pair))
            if self.found[rows].kind is self.found[owner].kind is FactorKind.PARALLEL
        )

    def _add(self, name: str, parts: Sequence[Dim], kind: FactorKind) -> tuple[str, ...]:
        names = [name] if len(parts) == 1 else [f"{name}.{i}" for i in range(len(parts))]
        for one, part in zip(names, parts, strict=True):
            self.found.setdefault(one, Factor(one, part.size, kind, self._atom_ids.get(part, -1)))
        return tuple(names)


def _broken(names_of: Sequence[Dims], matches: Sequence[Sequence[bool]]) -> set[str]:
    """The indices of dimensions whose atoms differ from the notation."""
    return {
        name
        for spelled, per_dim in zip(names_of, matches, strict=True)
        for names, ok in zip(spelled, per_dim, strict=True)
        if not ok
        for name in names
    }


def _joint_splits(notation: Notation, single: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """The joint splits whose indices are `single` atoms, so that the order of tiles is known."""
    return tuple(names for names in notation.joint_splits if all(name in single for name in names))
