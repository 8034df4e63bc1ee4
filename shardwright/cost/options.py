"""Everything one operator may do on a mesh: its feasible tilings, and what they mean, as arrays.

Operators whose rules differ only in the names of their factors share the very
same options: repeated layers are worked out once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import final

import numpy as np

from shardwright.cost.codes import BASE, Ints, digit, last_tile
from shardwright.ir.layout import Mesh
from shardwright.rules.rule import SPREAD, Route, Rule, Tiling, Together


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The feasible tilings of an operator, K of them, computed whole everywhere first if it may be.

    `choices[k]` has, per mesh axis, an index into `Rule.choices()`; layouts are
    codes, `sizes` the local sizes of the rule's factors on the largest device (of `SPREAD` from
    how many devices its rows are).
    """

    choices: tuple[tuple[int, ...], ...]
    sizes: Ints  # (factors, K)
    operands: Ints  # (operands, K)
    grads: Ints  # (operands, K), how the operands' gradients come back
    results: Ints  # (results, K)
    agreed: Ints  # (tensors of `Rule.agreed`, K)

    def __len__(self) -> int:
        return len(self.choices)

    def tiling(self, rule: Rule, k: int) -> Tiling:
        """Tiling k in the names of one of the rules that share these options."""
        known = rule.choices()
        return tuple(known[choice] for choice in self.choices[k])

    def find(self, rule: Rule, tiling: Tiling) -> int:
        """The number of `tiling`; raises `ValueError` if it is not feasible."""
        known = rule.choices()
        return self.choices.index(tuple(known.index(choice) for choice in tiling))


Only = tuple[frozenset[int], ...]  # per mesh axis, the choices or placements that are left


@dataclass(frozen=True)
class Allowed:
    """What constraints, or decisions made before, leave: who is not named may do all.

    Of operators the numbers, in `Rule.choices()`, of the choices that are left along each axis; of
    parameters the digits of their layouts (`codes.py`).
    """

    operators: Mapping[str, Only] = field(default_factory=dict)
    parameters: Mapping[str, Only] = field(default_factory=dict)


@final
class OptionBook:
    """Works out options on `mesh`, once for rules of equal form."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[Hashable, Options] = {}

    def options(self, rule: Rule, only: Only | None = None) -> Options:
        """What an operator with this rule may do, of the choices that are left to it."""
        form = _form(rule), only
        if form not in self._known:
            self._known[form] = _options(rule, self._mesh, only)
        return self._known[form]


def _form(rule: Rule) -> Hashable:
    """A rule without the names of its factors: all that its options depend on."""
    index = {factor.name: i for i, factor in enumerate(rule.factors)}
    dims = tuple(
        tuple(tuple(index[name] for name in names) for names in port)
        for port in (*rule.operands, *rule.results, *rule.agreed)
    )
    factors = tuple((factor.size, factor.least, factor.kind) for factor in rule.factors)
    routes = tuple((index[rows], index[owners]) for rows, owners in rule.routes)
    together = tuple(tuple(index[name] for name in names) for names in rule.together)
    counts = len(rule.operands), len(rule.results)
    return counts, dims, factors, rule.additive, rule.linear, routes, together


def _options(rule: Rule, mesh: Mesh, only: Only | None) -> Options:
    known = rule.choices()
    per_axis: list[Sequence[int]] = [range(len(known) if size > 1 else 1) for size in mesh.shape]
    if only is not None:
        per_axis = [
            [choice for choice in choices if size == 1 or choice in left]
            for choices, left, size in zip(per_axis, only, mesh.shape, strict=True)
        ]
    shared = [isinstance(choice, Together) for choice in known]
    every = [one for one in product(*per_axis) if sum(shared[choice] for choice in one) <= 1]
    chosen = np.array(every, np.int64).reshape(len(every), len(mesh.axes))
    index = {factor.name: i for i, factor in enumerate(rule.factors)}
    cuts = np.zeros((len(known), len(rule.factors)), bool)
    for number, choice in enumerate(known):
        cuts[number, [index[name] for name in rule.cuts(choice)]] = True
    routes = np.array([isinstance(choice, Route) for choice in known])
    largest = np.array([[factor.size] * len(every) for factor in rule.factors], np.int64)
    largest = largest.reshape(len(rule.factors), len(every))
    least = np.array([factor.least or factor.size for factor in rule.factors], np.int64)
    last = np.broadcast_to(least[:, None], largest.shape)
    for axis, parts in enumerate(mesh.shape):
        cut = cuts[chosen[:, axis]].T
        largest = np.where(cut, -(-largest // parts), largest)
        last = np.where(cut, last_tile(last, parts), last)
        if rule.routes:
            largest[index[SPREAD]] *= np.where(routes[chosen[:, axis]], parts, 1)
    empty = np.array([factor.size == 0 for factor in rule.factors], bool)
    good = ((last > 0) | empty[:, None]).all(axis=0)
    chosen = chosen[good]

    placed = [rule.placed(choice) for choice in known]

    def codes(field: str, ports: tuple[tuple[tuple[str, ...], ...], ...]) -> Ints:
        counts = [[len(names) for names in dims] for dims in ports]
        table = np.array(
            [
                [digit(p, c) for p, c in zip(getattr(one, field), counts, strict=True)]
                for one in placed
            ],
            np.int64,
        ).reshape(len(placed), len(ports))
        total = np.zeros((len(ports), len(chosen)), np.int64)
        for axis in range(len(mesh.axes)):
            total += table[chosen[:, axis]].T * BASE**axis
        return _frozen(total)

    return Options(
        tuple(tuple(row) for row in chosen.tolist()),
        _frozen(largest[:, good]),
        codes("operands", rule.operands),
        codes("operand_grads", rule.operands),
        codes("results", rule.results),
        codes("agreed", rule.agreed),
    )


def _frozen(values: Ints) -> Ints:
    values.flags.writeable = False
    return values
