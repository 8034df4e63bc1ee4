"""An operator in index notation, and the effect of splitting each of its factors.

`m k, n k -> m n` says that a linear layer relates three factors. Splitting `m`
or `n` leaves the output sharded, splitting `k` leaves partial sums. The
notation also fixes the backward pass: the gradient of an operand that has the
split factor is the same Shard, that of an operand without it is Partial, and the
gradient of a Partial result must be Replicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

from shardwright.ir.layout import PARTIAL, REPLICATE, Atoms, Partial, Placement, Shard


class FactorKind(Enum):
    """Whether a factor may be split."""

    PARALLEL = "parallel"  # may be split; sharded wherever it appears
    WHOLE = "whole"  # every device needs all of it (softmax, norms, convolution windows)


@dataclass(frozen=True, slots=True)
class Factor:
    """One index of a rule.

    Attributes:
        name: the index as it is written.
        size: how many values it takes.
        kind: what splitting it does.
        atom: the id of its atom in the unified graph, for names; -1 for none.
        least: the size in the shortest of several micro-batches; 0 where all are equal.
    """

    name: str
    size: int
    kind: FactorKind
    atom: int = -1
    least: int = 0


@dataclass(frozen=True, slots=True)
class Split:
    """Along one mesh axis, the operator's `factor` is cut into tiles."""

    factor: str

    def __str__(self) -> str:
        return self.factor


@dataclass(frozen=True, slots=True)
class Route:
    """Along one mesh axis, `rows` and `owners` are both split, and rows are exchanged.

    An all-to-all sends each row to the device that holds the owner it chose, and another returns
    the results (expert parallelism). Operands, results and gradients are sharded.
    """

    rows: str
    owners: str

    def __str__(self) -> str:
        return f"{self.rows}>{self.owners}"


@dataclass(frozen=True, slots=True)
class PassPartial:
    """Along one mesh axis, a linear operator maps partial sums to partial sums.

    `term` is the index, in `Rule.linear`, of the set of operands that carry them.
    """

    term: int

    def __str__(self) -> str:
        return f"+{self.term}"


@dataclass(frozen=True, slots=True)
class JointSplit:
    """Along one mesh axis, several factors of the operator are split at once (ring attention).

    One of `Rule.joint_splits`; allowed along at most one axis. Named after its first factor.
    """

    factors: tuple[str, ...]

    def __str__(self) -> str:
        return "~".join(self.factors)


# None: every device along the axis computes all of it.
Choice = Split | Route | JointSplit | PassPartial | None
Tiling = tuple[Choice, ...]  # one choice per mesh axis


@dataclass(frozen=True, slots=True)
class AxisPlacements:
    """The placements along one axis under one choice.

    Attributes:
        operands: of each operand, as it is read.
        results: of each result, as it is made.
        operand_grads: in which the backward pass produces the gradient of each operand.
        result_grads: in which it needs the gradient of each result.
        internal_reductions: of the tensors of `Rule.internal_reductions`: a Partial one is
            all-reduced while the operator runs.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    operand_grads: tuple[Placement, ...]
    result_grads: tuple[Placement, ...]
    internal_reductions: tuple[Placement, ...] = ()


SPREAD = "spread"  # the factor for the number of devices that rows come from; see `Rule.routes`
Dims = tuple[tuple[str, ...], ...]  # per tensor dimension, the names of its factors, major first


@dataclass(frozen=True)
class Rule:
    """One operator call in index notation, at the atoms' resolution.

    Operands are those of `Op.operands` in that order; results those of `Op.outputs`.

    * `additive`: operands that are added to the result (a bias): Partial if the
      result is, so that they are added only once.
    * `linear`: sets of operands in which the operator is linear, so that it maps
      partial sums to partial sums.
    * `work`: factors whose sizes multiply to the number of multiply-adds of a
      contraction, done `work_repeats` times (attention has two); empty for
      operators that are bound by memory.
    * `internal_reductions`: tensors inside of the operator that its forward pass needs reduced. If
      a split factor makes one Partial, it is all-reduced over the axis (e.g. the largest logit and
      the sum of exponentials of a cross entropy).
    * `routes`: pairs of factors that may be split together along one axis: rows, and the owners
      among which each row chooses (tokens and experts). A device then computes rows of all devices
      along the axis; the factor `SPREAD`, of size one otherwise, is their number.
    * `joint_splits`: factors that may only be split together, by devices that exchange tiles
      while the operator runs (`contractions.attention`).
    * `reason`: why the whole factors are whole.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    work: tuple[str, ...] = ()
    work_repeats: int = 1
    internal_reductions: tuple[Dims, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    joint_splits: tuple[tuple[str, ...], ...] = ()
    reason: str = ""

    @cached_property
    def factor(self) -> dict[str, Factor]:
        return {factor.name: factor for factor in self.factors}

    def choices(self) -> tuple[Choice, ...]:
        """The choices along one axis: replicate, split, route, split jointly, pass partial sums."""
        return self._choices

    @cached_property
    def _choices(self) -> tuple[Choice, ...]:
        splits = (Split(f.name) for f in self.factors if f.kind is FactorKind.PARALLEL)
        passes = (PassPartial(term) for term in range(len(self.linear)))
        routes = (Route(*pair) for pair in self.routes)
        return (None, *splits, *routes, *map(JointSplit, self.joint_splits), *passes)

    @cached_property
    def by_word(self) -> dict[str, Choice]:
        """All choices by their words (`word_of`)."""
        return {word_of(choice): choice for choice in self._choices}

    @property
    def why_unsplittable(self) -> str:
        """Why no factor may be split; empty if one may be, or if there is no factor."""
        splits = any(self.cuts(choice) for choice in self._choices)
        return "" if splits or not self.factors else self.reason

    def cuts(self, choice: Choice) -> tuple[str, ...]:
        """The factors that `choice` splits."""
        if isinstance(choice, Route):
            return choice.rows, choice.owners
        if isinstance(choice, JointSplit):
            return choice.factors
        return (choice.factor,) if isinstance(choice, Split) else ()

    def owner_parts(self, tiling: Tiling, sizes: Sequence[int]) -> int:
        """Among how many devices `tiling` divides owners (`routes`) on axes of these sizes."""
        owners = {owner for _, owner in self.routes}
        parts = zip(tiling, sizes, strict=True)
        return prod(size for choice, size in parts if owners & {*self.cuts(choice)})

    @property
    def owners(self) -> int:
        """Number of owners; 1 without routes."""
        return prod(self.factor[name].size for name in {owner for _, owner in self.routes})

    def axis_placements(self, choice: Choice) -> AxisPlacements:
        """The placements along an axis under `choice`."""
        if (found := self._known.get(choice)) is None:
            found = self._known[choice] = self._axis_placements(choice)
        return found

    @cached_property
    def _known(self) -> dict[Choice, AxisPlacements]:
        return {}  # layers share their rules, and many plans make the same choices

    def _axis_placements(self, choice: Choice) -> AxisPlacements:
        """The placements along one axis under a choice, computed anew."""
        if choice is None:
            whole = (REPLICATE,) * len(self.operands)
            out = (REPLICATE,) * len(self.results)
            return AxisPlacements(
                whole, out, whole, out, (REPLICATE,) * len(self.internal_reductions)
            )
        if isinstance(choice, PassPartial):
            return self._passed(self.linear[choice.term])
        cut = self.cuts(choice)
        results: tuple[Placement, ...] = tuple(
            _shard_of(cut, dims) or PARTIAL for dims in self.results
        )
        summed = any(isinstance(p, Partial) for p in results)
        operands: list[Placement] = []
        grads: list[Placement] = []
        for i, dims in enumerate(self.operands):
            shard = _shard_of(cut, dims)
            if shard is not None:
                operands.append(shard)
                grads.append(shard)
            elif summed and i in self.additive:
                operands.append(PARTIAL)
                grads.append(REPLICATE)
            else:
                operands.append(REPLICATE)
                grads.append(PARTIAL)
        wanted = tuple(REPLICATE if isinstance(p, Partial) else p for p in results)
        internal_reductions = tuple(
            _shard_of(cut, dims) or PARTIAL for dims in self.internal_reductions
        )
        return AxisPlacements(tuple(operands), results, tuple(grads), wanted, internal_reductions)

    def _passed(self, carriers: frozenset[int]) -> AxisPlacements:
        """The placements if the operands `carriers` are partial sums.

        The gradients of `carriers` do not depend on the sum; the gradients of operands that
        multiply them do.
        """
        at = range(len(self.operands))
        return AxisPlacements(
            operands=tuple(PARTIAL if i in carriers else REPLICATE for i in at),
            results=(PARTIAL,) * len(self.results),
            operand_grads=tuple(REPLICATE if i in carriers else PARTIAL for i in at),
            result_grads=(REPLICATE,) * len(self.results),
            internal_reductions=(REPLICATE,) * len(self.internal_reductions),
        )

    def atoms(self, dims: Dims) -> Atoms:
        """Global atom sizes of an operand or result."""
        sizes = {factor.name: factor.size for factor in self.factors}
        return tuple(tuple(sizes[name] for name in names) for names in dims)

    def __str__(self) -> str:
        left = ", ".join(
            ("+" if i in self.additive else "") + _dims_text(dims)
            for i, dims in enumerate(self.operands)
        )
        return f"{left} -> {', '.join(_dims_text(dims) for dims in self.results)}"


def word_of(choice: Choice) -> str:
    """A factor's name, `+i` for partial sums passed through, `-` for neither.

    >>> word_of(None), word_of(PassPartial(0)), word_of(Split("m"))
    ('-', '+0', 'm')
    """
    return "-" if choice is None else str(choice)


def joint_split(tiling: Tiling) -> tuple[int, JointSplit] | None:
    """The index of the axis with a `JointSplit`, and that choice; None if there is none."""
    found = [(axis, choice) for axis, choice in enumerate(tiling) if isinstance(choice, JointSplit)]
    return found[0] if found else None


def _shard_of(cut: tuple[str, ...], dims: Dims) -> Shard | None:
    for dim, names in enumerate(dims):
        for place, name in enumerate(names):
            if name in cut:
                return Shard(dim, place)
    return None


def _dims_text(dims: Dims) -> str:
    if not dims:
        return "[]"
    return " ".join(
        names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1" for names in dims
    )
