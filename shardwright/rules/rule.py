"""An operator in index notation, and the effect of splitting each of its factors.

`m k, n k -> m n` says that a linear layer relates three factors. Splitting `m`
or `n` leaves the output sharded, splitting `k` leaves partial sums. The same
sentence gives the backward pass (design: gradients have layouts too): an
operand that carries the split factor gets its gradient as the same Shard, one
that lacks it gets it as Partial, and the gradient of a Partial value is wanted
whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from shardwright.ir.layout import PARTIAL, REPLICATE, Atoms, Partial, Placement, Shard


class FactorKind(Enum):
    """Whether a factor may be split."""

    PARALLEL = "parallel"  # may be split; sharded wherever it appears
    WHOLE = "whole"  # every device needs all of it (softmax, norms, convolution windows)


@dataclass(frozen=True, slots=True)
class Factor:
    """One index of a rule. `atom` is the id of its atom in the unified graph, for names.

    `least` is the size in the shortest of several micro-batches, 0 where all are equal.
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
    """Along one mesh axis, `rows` and `owners` are both cut into tiles, and rows travel.

    Each row is sent to the devices that hold what it chose, and what they make of it is sent back.
    Seen from outside all is sharded, forward and backward.
    """

    rows: str
    owners: str

    def __str__(self) -> str:
        return f"{self.rows}>{self.owners}"


@dataclass(frozen=True, slots=True)
class PassPartial:
    """Along one mesh axis, partial sums go through a linear operator unreduced.

    `term` is the index, in `Rule.linear`, of the set of operands that carry them.
    """

    term: int

    def __str__(self) -> str:
        return f"+{self.term}"


@dataclass(frozen=True, slots=True)
class Together:
    """Along one mesh axis, several factors of the operator are cut into tiles, all of them at once.

    One of `Rule.together`; at most one axis may do so. The first factor gives it its name.
    """

    factors: tuple[str, ...]

    def __str__(self) -> str:
        return "~".join(self.factors)


# None: every device along the axis computes all of it.
Choice = Split | Route | Together | PassPartial | None
Tiling = tuple[Choice, ...]  # one choice per mesh axis


@dataclass(frozen=True, slots=True)
class Placed:
    """What one choice means along its axis, per operand and per result, forward and backward.

    `operand_grads[i]` is how the gradient of operand i comes out of the
    operator's backward; `result_grads[i]` is how the gradient of result i is wanted.
    `agreed` are the tensors of `Rule.agreed`: the devices that hold terms of one bring them
    together while the operator runs.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    operand_grads: tuple[Placement, ...]
    result_grads: tuple[Placement, ...]
    agreed: tuple[Placement, ...] = ()


SPREAD = "spread"  # the factor that says from how many devices rows come; see `Rule.routes`
Dims = tuple[tuple[str, ...], ...]  # per tensor dimension, the names of its factors, major first


@dataclass(frozen=True)
class Rule:
    """One operator call in index notation, at the atoms' resolution.

    Operands are those of `Op.operands` in that order; results those of `Op.outputs`.

    * `additive`: operands that are added to the result (a bias): where the
      result becomes partial they are taken as Partial, so they count once.
    * `linear`: sets of operands in which the operator is linear, so that partial
      sums may pass through it.
    * `work`: factors whose sizes multiply to the number of multiply-adds of a
      contraction, done `work_repeats` times (attention has two); empty for
      operators that are bound by memory.
    * `agreed`: tensors inside of the operator that its forward pass needs whole: where
      splitting a factor leaves terms of one they are reduced over the axis, once each (the
      largest logit and the sum of exponentials of a cross entropy).
    * `routes`: pairs of factors that may be cut along one axis together, rows and what they choose
      among. A device then works on rows of all devices along the axis: so many times more than its
      own, which the factor `SPREAD` counts (its size is one, and grows where others are cut).
    * `together`: factors that may only be cut at once, by devices that hand each other tiles
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
    agreed: tuple[Dims, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    reason: str = ""

    @cached_property
    def factor(self) -> dict[str, Factor]:
        return {factor.name: factor for factor in self.factors}

    def choices(self) -> tuple[Choice, ...]:
        """What the operator may do along one axis: replicate, split, route, pass partials."""
        return self._choices

    @cached_property
    def _choices(self) -> tuple[Choice, ...]:
        splits = (Split(f.name) for f in self.factors if f.kind is FactorKind.PARALLEL)
        passes = (PassPartial(term) for term in range(len(self.linear)))
        routes = (Route(*pair) for pair in self.routes)
        return (None, *splits, *routes, *map(Together, self.together), *passes)

    @cached_property
    def by_word(self) -> dict[str, Choice]:
        """All choices by what `word_of` calls them."""
        return {word_of(choice): choice for choice in self._choices}

    @property
    def why_whole(self) -> str:
        """Why no dimension may be split; empty where one may, or where there is none."""
        splits = any(self.cuts(choice) for choice in self._choices)
        return "" if splits or not self.factors else self.reason

    def cuts(self, choice: Choice) -> tuple[str, ...]:
        """The factors that `choice` cuts into tiles."""
        if isinstance(choice, Route):
            return choice.rows, choice.owners
        if isinstance(choice, Together):
            return choice.factors
        return (choice.factor,) if isinstance(choice, Split) else ()

    def shares_owners(self, tiling: Tiling) -> bool:
        """Whether devices have different ones of what rows choose among (`routes`)."""
        owners = {owner for _, owner in self.routes}
        return any(owners & {*self.cuts(choice)} for choice in tiling)

    def placed(self, choice: Choice) -> Placed:
        """Placements along the axis on which `choice` is made."""
        if (found := self._known.get(choice)) is None:
            found = self._known[choice] = self._placed(choice)
        return found

    @cached_property
    def _known(self) -> dict[Choice, Placed]:
        return {}  # as layers share their rules, and plans ask for the same

    def _placed(self, choice: Choice) -> Placed:
        if choice is None:
            whole = (REPLICATE,) * len(self.operands)
            out = (REPLICATE,) * len(self.results)
            return Placed(whole, out, whole, out, (REPLICATE,) * len(self.agreed))
        if isinstance(choice, PassPartial):
            return self._passed(self.linear[choice.term])
        cut = self.cuts(choice)
        results: tuple[Placement, ...] = tuple(
            _where(cut, dims) or PARTIAL for dims in self.results
        )
        summed = any(isinstance(p, Partial) for p in results)
        operands: list[Placement] = []
        grads: list[Placement] = []
        for i, dims in enumerate(self.operands):
            shard = _where(cut, dims)
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
        agreed = tuple(_where(cut, dims) or PARTIAL for dims in self.agreed)
        return Placed(tuple(operands), results, tuple(grads), wanted, agreed)

    def _passed(self, carriers: frozenset[int]) -> Placed:
        """Partial sums in the operands `carriers` go through.

        The gradients of these do not depend on the sum, those of what multiplies them do.
        """
        at = range(len(self.operands))
        return Placed(
            operands=tuple(PARTIAL if i in carriers else REPLICATE for i in at),
            results=(PARTIAL,) * len(self.results),
            operand_grads=tuple(REPLICATE if i in carriers else PARTIAL for i in at),
            result_grads=(REPLICATE,) * len(self.results),
            agreed=(REPLICATE,) * len(self.agreed),
        )

    def atoms(self, dims: Dims) -> Atoms:
        """Global atom sizes of an operand or result."""
        sizes = {factor.name: factor.size for factor in self.factors}
        return tuple(tuple(sizes[name] for name in names) for names in dims)

    def __str__(self) -> str:
        left = ", ".join(
            ("+" if i in self.additive else "") + _text(dims)
            for i, dims in enumerate(self.operands)
        )
        return f"{left} -> {', '.join(_text(dims) for dims in self.results)}"


def word_of(choice: Choice) -> str:
    """A factor's name, `+i` for partial sums passed through, `-` for neither.

    >>> word_of(None), word_of(PassPartial(0)), word_of(Split("m"))
    ('-', '+0', 'm')
    """
    return "-" if choice is None else str(choice)


def together(tiling: Tiling) -> tuple[int, Together] | None:
    """The one axis along which factors are cut at once, by its number, and which they are."""
    found = [(axis, choice) for axis, choice in enumerate(tiling) if isinstance(choice, Together)]
    return found[0] if found else None


def _where(cut: tuple[str, ...], dims: Dims) -> Shard | None:
    for dim, names in enumerate(dims):
        for place, name in enumerate(names):
            if name in cut:
                return Shard(dim, place)
    return None


def _text(dims: Dims) -> str:
    if not dims:
        return "[]"
    return " ".join(
        names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1" for names in dims
    )
