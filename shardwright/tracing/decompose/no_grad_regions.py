"""Inlines `torch.no_grad` and `torch.enable_grad` regions of an exported program.

Export keeps such a region as a sub-graph under a higher-order operator. Decomposing the program
would inline its operators, but lose the fact that autograd did not record them. Here the inputs of
operators that were not recorded are detached.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwright.tracing.decompose.dead_nodes import remove_dead_nodes

_REGION = "wrap_with_set_grad_enabled"  # arguments: whether to record, sub-graph, its inputs
_DETACH = torch.ops.aten.detach.default


def inline_regions(program: ExportedProgram) -> None:
    """Replace each region in `program`, in place, by its operators, also nested regions."""
    found = _Regions(program.graph_module)
    for node in list(program.graph.nodes):
        if _is_region(node):
            found.inline(node)
    if found.changed:
        remove_dead_nodes(program.graph)
        program.graph_module.recompile()


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) == _REGION


class _Regions:
    """Inlines the regions of one graph."""

    def __init__(self, owner: fx.GraphModule) -> None:
        self.graph = owner.graph
        self.owner = owner
        self.changed = False
        self.unrecorded: set[fx.Node] = set()  # results of operators that autograd does not record
        self.detached: dict[fx.Node, fx.Node] = {}

    def inline(self, node: fx.Node) -> None:
        """Replace the call of a region, and the selections of its results, by its operators."""
        self.changed = True
        with self.graph.inserting_before(node):
            results = self._copied(self.owner, node, list(node.args[2:]))
        for user in list(node.users):  # each selects one result
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _copied(self, owner: fx.GraphModule, call: fx.Node, operands: list[Any]) -> list[Any]:
        """The results of a region whose nodes are copied in place of its call."""
        recorded, inner = call.args[0], call.args[1]
        assert isinstance(inner, fx.Node)
        region = getattr(owner, str(inner.target))
        given = iter(operands)
        env: dict[fx.Node, Any] = {}
        several: dict[fx.Node, list[Any]] = {}  # results of nested regions
        for node in region.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return list(fx.node.map_arg(node.args[0], env.__getitem__))
            elif node.op == "get_attr":
                continue  # the graph of a nested region, which its call inlines
            elif _is_region(node):
                several[node] = self._copied(region, node, [env[n] for n in node.args[2:]])
            elif node.args and node.args[0] in several:
                env[node] = several[node.args[0]][node.args[1]]
            else:
                env[node] = self._copy(node, env, bool(recorded))
        raise AssertionError("a region's graph has an output")

    def _copy(self, node: fx.Node, env: dict[fx.Node, Any], recorded: bool) -> fx.Node:
        def operand(n: fx.Node) -> fx.Node:
            at: fx.Node = env[n]
            return at if recorded or at in self.unrecorded else self._detach(at)

        made = self.graph.node_copy(node, operand)
        if not recorded:
            self.unrecorded.add(made)
        return made

    def _detach(self, node: fx.Node) -> fx.Node:
        """`node` detached, once for all regions that read it."""
        if node not in self.detached:
            with self.graph.inserting_after(node):
                made = self.graph.call_function(_DETACH, (node,))
            made.meta = dict(node.meta)
            self.detached[node] = made
            self.unrecorded.add(made)
        return self.detached[node]
