"""Recognises scores of all experts that are exactly zero where a token did not choose an expert.

Routers write them so: `topk` chooses experts, a value for each is scattered into a constant, minus
infinity or zero, and elementwise operators or a softmax over experts follow. The constant has no
gradient, so neither have scores of experts that were not chosen, and those of chosen ones are
gathered by the indices of `topk`, which are distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from shardwright.ir.graph import Graph, Op, argument
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.rewrites.expert_steps import is_elementwise
from shardwright.tracing.rewrites.moved_axes import MOVES, SAME, Axes, grouped, moved, named

_CONSTANTS = {"zeros": 0.0, "zeros_like": 0.0}
_FILLED = ("full", "full_like")


class Scores(NamedTuple):
    """A value with the scores of all experts for all tokens.

    Attributes:
        every: the scores (..., experts) from which the value is only moved or cast.
        chosen: indices of experts (..., k), at which scores are not zero.
        moves: the operators that make the value from `every`, in order.
    """

    every: str
    chosen: str
    moves: tuple[Op, ...]

    def shape(self, graph: Graph) -> tuple[int, int, int]:
        """Tokens, experts, and experts of a token."""
        *tokens, experts = graph.tensor[self.every].shape
        return prod(tokens), experts, graph.tensor[self.chosen].shape[-1]

    def axes(self, graph: Graph) -> Axes:
        """The axes of the value: of tokens "t" and experts "e"; raises `MovedError`."""
        tokens, experts, _ = self.shape(graph)
        every = (*named("t", tokens), *named("e", experts))
        found = grouped(every, graph.tensor[self.every].shape)
        for op in self.moves:
            found = moved(op, found, graph.tensor[op.outputs[0]].shape)
        return found


def scattered_scores(graph: Graph, name: str) -> Scores | None:
    """Finds the origin of the scores `name`; None if other experts may have any but zero."""
    path: list[Op] = []
    while (op := graph.producer.get(name)) is not None and op.kind != "scatter":
        if len(op.operands) != 1 or len(op.outputs) != 1 or len(path) > _LONGEST:
            return None
        path.insert(0, op)
        name = op.operands[0]
    if op is None or (k := _scattered(graph, op)) is None:
        return None
    start = next((i for i, one in enumerate(path) if _only_moves(one)), len(path))
    computed, moves = path[:start], tuple(path[start:])
    if not all(one.kind in MOVES for one in moves) or not _zero(graph, op, k, computed):
        return None
    return Scores(computed[-1].outputs[0] if computed else op.outputs[0], op.operands[1], moves)


_LONGEST = 16  # operators from the scattered values to the product that they scale


def _only_moves(op: Op) -> bool:
    return op.kind in MOVES and op.kind not in SAME


def _scattered(graph: Graph, op: Op) -> int | None:
    """Experts of a token, where `op` scatters a value for each at the indices of a `topk`."""
    if op.target != "aten.scatter.src" or len(op.operands) != 3:
        return None
    every, chosen, _ = (graph.tensor[name].shape for name in op.operands)
    choice = graph.producer.get(op.operands[1])
    if choice is None or choice.kind != "topk" or choice.outputs[1] != op.operands[1]:
        return None
    last = (-1, len(every) - 1)
    if len(every) < 2 or op.args[1] not in last or argument(choice, 2, "dim", -1) not in last:
        return None
    fits = chosen[:-1] == every[:-1] and chosen[-1] < every[-1]
    return chosen[-1] if fits and _constant(graph, op.operands[0]) is not None else None


def _constant(graph: Graph, name: str) -> float | None:
    """The number that all elements of a value are, and that has no gradient; None if unknown."""
    op = graph.producer.get(name)
    if op is None or graph.tensor[name].requires_grad:
        return None
    filled = op.args[1] if op.kind in _FILLED else _CONSTANTS.get(op.kind)
    return float(filled) if isinstance(filled, int | float) else None


def _zero(graph: Graph, scatter: Op, k: int, computed: Sequence[Op]) -> bool:
    """Whether the operators after a scatter make the constant zero, whatever is scattered.

    They are run on rows with some numbers for the chosen experts. Elementwise operators do not mix
    these with the constant; a softmax does, unless the constant is minus infinity by then.
    """
    *leading, experts = graph.tensor[scatter.outputs[0]].shape
    constant = _constant(graph, scatter.operands[0])
    assert constant is not None
    dtype = getattr(torch, graph.tensor[scatter.outputs[0]].dtype)
    rank = len(leading) + 1
    rows = torch.full((*[1] * (rank - 2), 3, experts), constant, dtype=dtype, device="cpu")
    rows[..., :k] = torch.tensor([[-2.5], [0.0], [3.0]], dtype=dtype, device="cpu")
    for op in computed:
        if op.kind == "softmax":
            over_experts = argument(op, 1, "dim") in (rank - 1, -1)
            if not over_experts or not bool((rows[..., k:] == -torch.inf).all()):
                return False
        elif not op.target.startswith("aten.") or not is_elementwise(op):
            return False
        (rows,) = call_op(op, {op.operands[0]: rows}, torch.device("cpu"))
    return bool((rows[..., k:] == 0).all())
