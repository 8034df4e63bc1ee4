"""What devices tell each other while they compute one operator together (`Rule.agreed`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.codes import Ints, duals
from shardwright.cost.measure import Measure
from shardwright.cost.options import Options
from shardwright.ir.graph import ITEM_BYTES, Graph, Op
from shardwright.ir.layout import Atoms
from shardwright.rules.rule import Rule

Floats = NDArray[np.float64]


def agreement_seconds(
    rule: Rule, options: Options, item_bytes: int, measure: Measure, axes: int
) -> Floats:
    """Seconds of the reductions inside of one forward pass, per option: (K,)."""
    total = np.zeros(len(options))
    for dims, codes in zip(rule.agreed, options.agreed, strict=True):
        total += measure.redistributions(rule.atoms(dims), item_bytes, codes, duals(codes, axes))
    return total


def reductions(rule: Rule, options: Options, k: int, axes: int) -> Iterator[tuple[Atoms, int, int]]:
    """The atoms of what is reduced under option `k`, its layout before and after."""
    for dims, codes in zip(rule.agreed, options.agreed, strict=True):
        before: Ints = codes[k : k + 1]
        yield rule.atoms(dims), int(before[0]), int(duals(before, axes)[0])


def agreed_bytes(op: Op, graph: Graph) -> int:
    """Bytes of an element: what is brought together is at least in single precision."""
    return max(4, ITEM_BYTES[graph.tensor[op.operands[0]].dtype])
