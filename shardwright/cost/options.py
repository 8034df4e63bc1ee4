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
from numpy.typing import NDArray

from shardwright.cost.codes import BASE, Ints, digit, last_tile
from shardwright.ir.layout import Mesh
from shardwright.rules.rule import SPREAD, Route, Rule, Tiling, Together

Bools = NDArray[np.bool_]


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
    """Works out options on `mesh`, once for rules of equal form. Meshes may share their `forms`."""

    def __init__(self, mesh: Mesh, forms: Forms | None = None) -> None:
        self._mesh = mesh
        self._forms = forms or Forms()
        self._known: dict[Hashable, Options] = {}

    def options(self, rule: Rule, only: Only | None = None) -> Options:
        """What an operator with this rule may do, of the choices that are left to it."""
        key, form = self._forms.of(rule)
        if (key, only) not in self._known:
            self._known[key, only] = _options(form, self._mesh, only)
        return self._known[key, only]


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """What the choices of a rule mean along one axis, whatever the mesh."""

    together: tuple[bool, ...]  # of choices, whether they are made along one axis only
    cuts: Bools  # (choices, factors)
    routes: Bools  # (choices,)
    spread: int  # the factor `SPREAD`, -1 if there is none
    sizes: Ints  # (factors,)
    least: Ints  # (factors,), of the tile that counts
    placed: tuple[Ints, Ints, Ints, Ints]  # digits of operands, gradients, results, agreed tensors


@final
class Forms:
    """The forms of rules: what their options depend on, without the names of factors."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Rule, Hashable]] = {}  # by identity of the rule, kept alive
        self._known: dict[Hashable, _Form] = {}

    def of(self, rule: Rule) -> tuple[Hashable, _Form]:
        """The form of a rule, and what to know it by."""
        if id(rule) not in self._of:
            self._of[id(rule)] = rule, _key(rule)
        _, key = self._of[id(rule)]
        if key not in self._known:
            self._known[key] = _form(rule)
        return key, self._known[key]


def _key(rule: Rule) -> Hashable:
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


def _form(rule: Rule) -> _Form:
    known = rule.choices()
    index = {factor.name: i for i, factor in enumerate(rule.factors)}
    cuts = np.zeros((len(known), len(rule.factors)), bool)
    for number, choice in enumerate(known):
        cuts[number, [index[name] for name in rule.cuts(choice)]] = True
    placed = [rule.placed(choice) for choice in known]

    def digits(field: str, ports: tuple[tuple[tuple[str, ...], ...], ...]) -> Ints:
        counts = [[len(names) for names in dims] for dims in ports]
        table = [
            [digit(p, c) for p, c in zip(getattr(one, field), counts, strict=True)]
            for one in placed
        ]
        return np.array(table, np.int64).reshape(len(placed), len(ports))

    return _Form(
        tuple(isinstance(choice, Together) for choice in known),
        cuts,
        np.array([isinstance(choice, Route) for choice in known]),
        index[SPREAD] if rule.routes else -1,
        np.array([factor.size for factor in rule.factors], np.int64),
        np.array([factor.least or factor.size for factor in rule.factors], np.int64),
        (
            digits("operands", rule.operands),
            digits("operand_grads", rule.operands),
            digits("results", rule.results),
            digits("agreed", rule.agreed),
        ),
    )


def _options(form: _Form, mesh: Mesh, only: Only | None) -> Options:
    count = len(form.together)
    per_axis: list[Sequence[int]] = [range(count if size > 1 else 1) for size in mesh.shape]
    if only is not None:
        per_axis = [
            [choice for choice in choices if size == 1 or choice in left]
            for choices, left, size in zip(per_axis, only, mesh.shape, strict=True)
        ]
    every = list(product(*per_axis))
    if any(form.together):
        every = [one for one in every if sum(form.together[choice] for choice in one) <= 1]
    chosen = np.array(every, np.int64).reshape(len(every), len(mesh.axes))
    largest = np.repeat(form.sizes[:, None], len(every), axis=1)
    last = np.broadcast_to(form.least[:, None], largest.shape)
    for axis, parts in enumerate(mesh.shape):
        cut = form.cuts[chosen[:, axis]].T
        largest = np.where(cut, -(-largest // parts), largest)
        last = np.where(cut, last_tile(last, parts), last)
        if form.spread >= 0:
            largest[form.spread] *= np.where(form.routes[chosen[:, axis]], parts, 1)
    good = ((last > 0) | (form.sizes == 0)[:, None]).all(axis=0)
    chosen = chosen[good]

    def codes(table: Ints) -> Ints:
        total = np.zeros((table.shape[1], len(chosen)), np.int64)
        for axis in range(len(mesh.axes)):
            total += table[chosen[:, axis]].T * BASE**axis
        return _frozen(total)

    return Options(
        tuple(tuple(row) for row in chosen.tolist()),
        _frozen(largest[:, good]),
        *(codes(table) for table in form.placed),
    )


def _frozen(values: Ints) -> Ints:
    values.flags.writeable = False
    return values
