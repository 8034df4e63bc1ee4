"""Removes what nothing reads from an exported graph that is not decomposed yet."""

from __future__ import annotations

from types import FunctionType

from torch import fx


def remove_dead_nodes(graph: fx.Graph) -> None:
    """Remove nodes whose results nothing reads, and which have no effect.

    `torch.vmap` is in such a graph as calls of Python functions that begin and end each of its
    levels, whose results nothing reads.
    """
    graph.eliminate_dead_code(_has_effect)


def _has_effect(node: fx.Node) -> bool:
    python = node.op == "call_function" and isinstance(node.target, FunctionType)
    return python or node.is_impure()
