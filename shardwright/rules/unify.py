"""Unifies dimensions over a graph and refines them into atoms.

Every operator's notation says that dimensions of its operands and results are
equal, or products of each other. Solving these equations over the whole graph,
as a type checker would, refines each dimension into atoms: the 2304 outputs of
a fused projection become (3, 12, 64) because a later `split` and `view` say so.

Plain equalities are solved first, so that a reshape that cannot be reconciled
with them stays alone with its trouble: only that operator treats the
dimension as whole. What comes out is checked operator by operator, so a missed
or failed equation can cost choices but never correctness.

Complexity: nearly linear in the number of dimensions (union-find).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

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

    False, and possibly some harmless refinement, when their boundaries do not
    form one chain of divisors (6 = 2·3 = 3·2).
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
    """Products of the minor atoms, from none to all."""
    found = [1]
    for atom in reversed(atoms):
        found.append(found[-1] * atom.size)
    return found


def _refine(atoms: Sequence[Dim], bounds: Sequence[int]) -> bool:
    """Cut the first atom, from the minor side, that has a boundary inside; False if none has."""
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
    """Dims of every value, None where the size is one, and of every operator's indices."""

    values: Mapping[str, tuple[Dim | None, ...]]
    indices: Mapping[str, Mapping[str, Dim]]


def unify(graph: Graph, notations: Mapping[str, Notation]) -> Unified:
    """Solve the equations of all `notations`, which are by operator name."""
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
    numbers: Mapping[Dim, int],
) -> Rule:
    """The rule of one operator at the atoms' resolution.

    `values` are the atoms of every dimension of its operands and then of its results, none where
    the size is one, `numbers` the ids of atoms. Where notation and atoms disagree (an equation that
    could not be solved) the atoms stay whole, and so does every index involved.
    """
    atoms = {name: dim.atoms() for name, dim in indices.items()}
    names_of = (*notation.operands, *notation.results)
    agreed = [
        [
            not dim or [a for n in names for a in atoms[n]] == dim
            for dim, names in zip(value, spelled, strict=True)
        ]
        for value, spelled in zip(values, names_of, strict=True)
    ]
    broken = _broken(names_of, agreed)
    factors: dict[str, Factor] = {}
    labels: dict[str, tuple[str, ...]] = {}  # of indices, once they are factors

    def add(name: str, parts: Sequence[Dim], kind: FactorKind) -> tuple[str, ...]:
        names = [name] if len(parts) == 1 else [f"{name}.{i}" for i in range(len(parts))]
        for one, part in zip(names, parts, strict=True):
            factors.setdefault(one, Factor(one, part.size, kind, numbers.get(part, -1)))
        return tuple(names)

    def index(name: str) -> tuple[str, ...]:
        if name not in labels:
            whole = name in notation.whole or name in broken
            kind = FactorKind.WHOLE if whole else FactorKind.PARALLEL
            labels[name] = add(name, atoms[name], kind)
        return labels[name]

    dims: list[Dims] = []
    for v, (value, spelled) in enumerate(zip(values, names_of, strict=True)):
        found: list[tuple[str, ...]] = []
        for d, (dim, names) in enumerate(zip(value, spelled, strict=True)):
            if not dim:
                found.append(())
            elif not agreed[v][d]:
                found.append(add(f"v{v}d{d}", dim, FactorKind.WHOLE))
            elif len(names) == 1:
                found.append(index(names[0]))
            else:
                found.append(tuple([label for name in names for label in index(name)]))
        dims.append(tuple(found))
    work = tuple(label for name in notation.work for label in index(name))
    within = tuple(
        tuple(tuple(label for name in names for label in index(name)) for names in one)
        for one in notation.agreed
    )
    routes = tuple(
        (rows, owner)
        for pair in notation.routes
        if set(pair) <= set(indices) and len(atoms[pair[1]]) == 1
        for rows, owner in product(*map(index, pair))
        if factors[rows].kind is factors[owner].kind is FactorKind.PARALLEL
    )
    if routes:
        factors[SPREAD] = Factor(SPREAD, 1, FactorKind.WHOLE)
        work = (*work, SPREAD)
    together = _together(notation, {name for name in atoms if len(atoms[name]) == 1} - broken)
    for name in {name for names in together for name in names}:
        index(name)
    count = len(notation.operands)
    return Rule(
        factors=tuple(factors.values()),
        operands=tuple(dims[:count]),
        results=tuple(dims[count:]),
        additive=notation.additive,
        linear=notation.linear,
        work=work,
        work_repeats=notation.work_repeats,
        agreed=within,
        routes=routes,
        together=together,
        reason=_SHARED if broken else notation.reason or (_ALL if notation.whole else ""),
    )


def _broken(names_of: Sequence[Dims], agreed: Sequence[Sequence[bool]]) -> set[str]:
    """The indices in a dimension that is not what the notation says."""
    return {
        name
        for spelled, good in zip(names_of, agreed, strict=True)
        for names, ok in zip(spelled, good, strict=True)
        if not ok
        for name in names
    }


def _together(notation: Notation, single: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """What may be cut together: only of `single` atoms is it known whose tile comes when."""
    return tuple(names for names in notation.together if all(name in single for name in names))
