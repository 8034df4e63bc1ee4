"""Routers that choose groups of experts first, as DeepSeek's, so that a token visits few devices.

Such a router scores groups of experts, keeps the best ones of each token by a mask that is
scattered to them, and chooses experts in these alone (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434,
2024, 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.ir.graph import Graph, Op

_MASK_VIEWS = (  # operators between a mask of groups and the mask of experts
    "view", "reshape", "expand", "unsqueeze", "clone", "_to_copy", "bitwise_not", "logical_not",
    "repeat_interleave", "alias",
)  # fmt: skip
_MASKED = ("masked_fill", "where", "mul")


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Groups of neighbouring experts of equal size, of which a token's experts are in `chosen`."""

    groups: int
    chosen: int


ANY = GroupLimit(1, 1)  # experts of one group, which holds all


def group_limit(op: Op, graph: Graph) -> GroupLimit:
    """The groups of a mixture's router; `ANY` if it has none, or one that is not known."""
    experts = graph.tensor[op.operands[3]].shape[0]
    choice = _origin(op.operands[1], graph)
    if choice is None or choice.kind != "topk":
        return ANY
    masked = graph.producer.get(choice.operands[0])
    if masked is None or masked.kind not in _MASKED:
        return ANY
    for name in masked.operands:
        scattered = _origin(name, graph)
        if scattered is None or scattered.kind != "scatter":
            continue
        groups = graph.tensor[scattered.outputs[0]].shape[-1]
        for index in scattered.operands[1:]:
            best = graph.producer.get(index)
            if best is None or best.kind != "topk" or best.outputs[1] != index:
                continue
            chosen = graph.tensor[index].shape[-1]
            if chosen < groups < experts and experts % groups == 0:
                return GroupLimit(groups, chosen)
    return ANY


def _origin(name: str, graph: Graph) -> Op | None:
    """The operator that makes the elements of a value, before views, copies and negations."""
    op = graph.producer.get(name)
    while op is not None and op.kind in _MASK_VIEWS:
        op = graph.producer.get(op.operands[0])
    return op
