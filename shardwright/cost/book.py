"""The layouts of one graph, each numbered once, so that equal questions are recognised fast.

Hashing a layout takes microseconds and a search asks for hundreds of thousands.
Numbers are compared instead, and operators whose rules differ only in the names
of their factors share their answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, final

from shardwright.cost.layouts import TilingLayouts, tiling_layouts
from shardwright.ir.graph import Op
from shardwright.ir.layout import Layout, Mesh
from shardwright.rules.rule import Choice, PassPartial, Rule, Split, Tiling


class Want(NamedTuple):
    """What one operand position asks of its edge, as numbers of layouts.

    `grad` is how the gradient comes back, None where none does.
    """

    operand: int
    grad: int | None


Wants = tuple[tuple[Want, ...], ...]  # per tiling, the different ones of an edge's positions


class _Shape(NamedTuple):
    """A rule without names: `numbers` of its choices, and everything else its layouts depend on."""

    numbers: dict[Choice, int]
    rest: Hashable


@final
class LayoutBook:
    """Numbers layouts on `mesh`, and answers per tiling what the rules mean for them."""

    def __init__(self, mesh: Mesh, rules: Mapping[str, Rule]) -> None:
        self._mesh = mesh
        self._rules = rules
        self._layouts: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._by_id: dict[int, tuple[int, Layout]] = {}  # holds the layout, so its id stays its own
        self._shapes: dict[str, _Shape] = {}
        self._placed: dict[Hashable, tuple[TilingLayouts, ...]] = {}
        self._wants: dict[Hashable, Wants] = {}

    def number(self, layout: Layout) -> int:
        """The number of `layout`; equal layouts have equal numbers."""
        known = self._by_id.get(id(layout))
        if known is None:
            number = self._numbers.setdefault(layout, len(self._layouts))
            if number == len(self._layouts):
                self._layouts.append(layout)
            known = self._by_id[id(layout)] = (number, layout)
        return known[0]

    def __getitem__(self, number: int) -> Layout:
        return self._layouts[number]

    def layouts(self, op: Op, tilings: Sequence[Tiling]) -> tuple[TilingLayouts, ...]:
        """Where everything lies, per tiling; operators of the same shape share the very objects."""
        key = self._key(op, tilings)
        if key not in self._placed:
            self._placed[key] = tuple(tiling_layouts(self._rules[op.name], tilings, self._mesh))
        return self._placed[key]

    def wants(
        self, op: Op, positions: Sequence[int], tilings: Sequence[Tiling], gradient: bool
    ) -> Wants:
        """What the operands at `positions` ask for, per tiling; equal ones are asked for once."""
        key = (self._key(op, tilings), tuple(positions), gradient)
        if key not in self._wants:
            self._wants[key] = tuple(
                tuple(
                    dict.fromkeys(
                        Want(
                            self.number(placed.operands[i]),
                            self.number(placed.operand_grads[i]) if gradient else None,
                        )
                        for i in positions
                    )
                )
                for placed in self.layouts(op, tilings)
            )
        return self._wants[key]

    def _key(self, op: Op, tilings: Sequence[Tiling]) -> Hashable:
        """Equal for equal layouts of all tilings, whatever the factors are called."""
        if op.name not in self._shapes:
            self._shapes[op.name] = _shape(self._rules[op.name])
        numbers, rest = self._shapes[op.name]
        return rest, tuple(tuple(numbers[choice] for choice in tiling) for tiling in tilings)


def _shape(rule: Rule) -> _Shape:
    index = {factor.name: i for i, factor in enumerate(rule.factors)}
    numbers: dict[Choice, int] = {None: -1}
    numbers.update((Split(name), i) for name, i in index.items())
    numbers.update((PassPartial(term), -2 - term) for term in range(len(rule.linear)))
    dims = tuple(
        tuple(tuple(index[name] for name in names) for names in port)
        for port in (*rule.operands, *rule.results)
    )
    return _Shape(numbers, (len(rule.operands), dims, rule.additive, rule.linear))
