"""The options of one operator on a mesh, as arrays: its feasible tilings and their layouts.

Operators whose rules differ only in factor names share one `Options` object, so that the options of
repeated layers are computed once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.layout import Mesh
from shardwright.planner.tables.layout_codes import BASE, Ints, digit, last_tile
from shardwright.rules.rule import SPREAD, FactorKind, JointSplit, Route, Rule, Tiling

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The K feasible tilings of an operator; the replicated one is first if it is allowed.

    `choices[k]` has, per mesh axis, an index into `Rule.choices()`. Layouts are codes. `sizes` are
    the local sizes of the rule's factors on the device with the largest tile; that of `SPREAD` is
    the number of devices from which an expert receives rows.
    """

    choices: tuple[tuple[int, ...], ...]
    sizes: Ints  # (factors, K)
    operands: Ints  # (operands, K)
    grads: Ints  # (operands, K), layouts of the operands' gradients as they are computed
    results: Ints  # (results, K)
    internal_reductions: Ints  # (tensors of `Rule.internal_reductions`, K)

    def __len__(self) -> int:
        return len(self.choices)

    def only(self, tilings: Tilings) -> Options:
        """These options without the tilings that are not in `tilings`, in the same order."""
        kept = [k for k, choice in enumerate(self.choices) if choice in tilings]
        arrays = (self.sizes, self.operands, self.grads, self.results, self.internal_reductions)
        return Options(
            tuple(self.choices[k] for k in kept), *(_frozen(array[:, kept]) for array in arrays)
        )

    def tiling(self, rule: Rule, k: int) -> Tiling:
        """Tiling `k` with the factor names of `rule`, which is one of those with these options."""
        known = rule.choices()
        return tuple(known[choice] for choice in self.choices[k])

    def find(self, rule: Rule, tiling: Tiling) -> int:
        """The number of `tiling`; raises `ValueError` if it is not feasible."""
        known = rule.choices()
        return self.choices.index(tuple(known.index(choice) for choice in tiling))


Only = tuple[frozenset[int], ...]  # per mesh axis, the choices or digits that are allowed
Tilings = frozenset[tuple[int, ...]]  # each has one choice per mesh axis


@dataclass(frozen=True)
class Allowed:
    """The choices that constraints or earlier decisions permit; missing names are unrestricted.

    Attributes:
        operators: by operator, per mesh axis the allowed indices into `Rule.choices()`.
        parameters: by parameter, per mesh axis the allowed digits (`layout_codes.py`).
        tilings: by operator, the allowed tilings.
    """

    operators: Mapping[str, Only] = field(default_factory=dict)
    parameters: Mapping[str, Only] = field(default_factory=dict)
    tilings: Mapping[str, Tilings] = field(default_factory=dict)


@final
class OptionCache:
    """Computes options on `mesh`, once for rules of equal form. Meshes may share `forms`."""

    def __init__(self, mesh: Mesh, forms: Forms | None = None) -> None:
        self._mesh = mesh
        self._forms = forms or Forms()
        self._known: dict[tuple[_Form, Only | None, Tilings | None], Options] = {}
        self._every: dict[tuple[_Meaning, Only | None], _Every] = {}

    def options(
        self, rule: Rule, only: Only | None = None, tilings: Tilings | None = None
    ) -> Options:
        """The options of an operator with `rule`, of the allowed choices and tilings."""
        form = self._forms.of(rule)
        if (form, only, tilings) not in self._known:
            if tilings is not None:
                self._known[form, only, tilings] = self.options(rule, only).only(tilings)
                return self._known[form, only, tilings]
            key = form.meaning, only
            if key not in self._every:
                self._every[key] = _every(form.meaning, self._mesh, only)
            self._known[form, only, None] = _options(form, self._mesh, self._every[key])
        return self._known[form, only, tilings]


@dataclass(frozen=True, slots=True, eq=False)
class _Meaning:
    """The effect of a rule's choices along one axis, for any mesh and sizes."""

    is_joint_split: tuple[bool, ...]  # of choices, whether they are made along one axis only
    cuts: Bools  # (choices, factors)
    routes: Bools  # (choices,)
    spread: int  # the factor `SPREAD`, -1 if there is none
    axis_placements: tuple[
        Ints, Ints, Ints, Ints
    ]  # digits of operands, gradients, results, internal reductions


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """The inputs of a rule's options; equal forms are one object."""

    meaning: _Meaning
    sizes: Ints  # (factors,)
    least: Ints  # (factors,), of the tile that counts


@dataclass(frozen=True, slots=True, eq=False)
class _Every:
    """All N tilings, feasible or not, and their layouts."""

    choices: list[tuple[int, ...]]
    chosen: Ints  # (N, axes)
    codes: tuple[Ints, Ints, Ints, Ints]  # (..., N), in the order of `_Meaning.axis_placements`


@final
class Forms:
    """The forms of rules: the inputs of their options, without the names of factors."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Rule, _Form]] = {}  # by identity of the rule, kept alive
        self._known: dict[Hashable, _Form] = {}
        self._meanings: dict[Hashable, _Meaning] = {}

    def of(self, rule: Rule) -> _Form:
        """The form of `rule`; equal forms are one object."""
        if id(rule) not in self._of:
            self._of[id(rule)] = rule, self._find(rule)
        return self._of[id(rule)][1]

    def _find(self, rule: Rule) -> _Form:
        kind, sizes = _key(rule), tuple([(f.size, f.least) for f in rule.factors])
        if (kind, sizes) not in self._known:
            if kind not in self._meanings:
                self._meanings[kind] = _meaning(rule)
            self._known[kind, sizes] = _Form(
                self._meanings[kind],
                np.array([size for size, _ in sizes], np.int64),
                np.array([least or size for size, least in sizes], np.int64),
            )
        return self._known[kind, sizes]


def _key(rule: Rule) -> Hashable:
    """The key of a rule's choices and their effect."""
    index = {factor.name: i for i, factor in enumerate(rule.factors)}
    dims = tuple(
        [
            tuple([tuple([index[name] for name in names]) for names in port])
            for port in (*rule.operands, *rule.results, *rule.internal_reductions)
        ]
    )
    split = tuple([factor.kind is FactorKind.PARALLEL for factor in rule.factors])
    routes = tuple([(index[rows], index[owners]) for rows, owners in rule.routes])
    joint_splits = tuple([tuple([index[name] for name in names]) for names in rule.joint_splits])
    counts = len(rule.operands), len(rule.results)
    return counts, dims, split, rule.additive, rule.linear, routes, joint_splits


def _meaning(rule: Rule) -> _Meaning:
    """The placements and cuts of each choice of a rule along one axis, as arrays."""
    known = rule.choices()
    index = {factor.name: i for i, factor in enumerate(rule.factors)}
    cuts = np.zeros((len(known), len(rule.factors)), bool)
    for number, choice in enumerate(known):
        cuts[number, [index[name] for name in rule.cuts(choice)]] = True
    axis_placements = [rule.axis_placements(choice) for choice in known]

    def digits(field: str, ports: tuple[tuple[tuple[str, ...], ...], ...]) -> Ints:
        counts = [[len(names) for names in dims] for dims in ports]
        table = [
            [digit(p, c) for p, c in zip(getattr(one, field), counts, strict=True)]
            for one in axis_placements
        ]
        return np.array(table, np.int64).reshape(len(axis_placements), len(ports))

    return _Meaning(
        tuple(isinstance(choice, JointSplit) for choice in known),
        cuts,
        np.array([isinstance(choice, Route) for choice in known]),
        index[SPREAD] if rule.routes else -1,
        (
            digits("operands", rule.operands),
            digits("operand_grads", rule.operands),
            digits("results", rule.results),
            digits("internal_reductions", rule.internal_reductions),
        ),
    )


def _every(meaning: _Meaning, mesh: Mesh, only: Only | None) -> _Every:
    """All combinations of choices over the axes, with the codes of their layouts."""
    count = len(meaning.is_joint_split)
    per_axis: list[Sequence[int]] = [range(count if size > 1 else 1) for size in mesh.shape]
    if only is not None:
        per_axis = [
            [choice for choice in choices if size == 1 or choice in left]
            for choices, left, size in zip(per_axis, only, mesh.shape, strict=True)
        ]
    every = list(product(*per_axis))
    if any(meaning.is_joint_split):
        every = [one for one in every if sum(meaning.is_joint_split[choice] for choice in one) <= 1]
    chosen = np.array(every, np.int64).reshape(len(every), len(mesh.axes))

    def codes(table: Ints) -> Ints:
        total = np.zeros((table.shape[1], len(chosen)), np.int64)
        for axis in range(len(mesh.axes)):
            total += table[chosen[:, axis]].T * BASE**axis
        return _frozen(total)

    operands, grads, results, internal_reductions = meaning.axis_placements
    return _Every(
        every, chosen, (codes(operands), codes(grads), codes(results), codes(internal_reductions))
    )


def _options(form: _Form, mesh: Mesh, every: _Every) -> Options:
    """The options: all tilings that give every device a non-empty tile."""
    meaning, chosen = form.meaning, every.chosen
    largest = np.repeat(form.sizes[:, None], len(chosen), axis=1)
    last = np.broadcast_to(form.least[:, None], largest.shape)
    for axis, parts in enumerate(mesh.shape):
        cut = meaning.cuts[chosen[:, axis]].T
        largest = np.where(cut, -(-largest // parts), largest)
        last = np.where(cut, last_tile(last, parts), last)
        if meaning.spread >= 0:
            largest[meaning.spread] *= np.where(meaning.routes[chosen[:, axis]], parts, 1)
    good = ((last > 0) | (form.sizes == 0)[:, None]).all(axis=0)
    if good.all():
        return Options(tuple(every.choices), _frozen(largest), *every.codes)
    kept = np.flatnonzero(good).tolist()
    return Options(
        tuple([every.choices[k] for k in kept]),
        _frozen(largest[:, good]),
        *(_frozen(codes[:, good]) for codes in every.codes),
    )


def _frozen(values: Ints) -> Ints:
    values.flags.writeable = False
    return values
