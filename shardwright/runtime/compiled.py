"""Programs through `torch.compile`: in pieces, between what is sent and waited for.

A graph that is compiled whole sends every parameter and sums every gradient by itself, and its
backward pass gives all gradients at its end. So buckets of parameters and of gradients stay as they
are, on their way while others compute, and what lies between them is compiled: what DDP does to a
module that is compiled (torch's `DDPOptimizer`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn
from torch.fx.passes.split_module import split_module

from shardwright.runtime.gathering import Arrival, Departure
from shardwright.runtime.loading import Loading, Reduction
from shardwright.runtime.regather import Regathering

_EAGER = (Loading, Reduction, Departure, Arrival, Regathering)


def compiled(program: fx.GraphModule) -> fx.GraphModule:
    """`program` with its pieces compiled; a program that sends nothing is one piece."""
    modules = dict(program.named_modules())
    parts, eager = _parts(program, modules)
    if not eager:
        program.compile()
        return program
    pieces: fx.GraphModule = split_module(program, program, lambda node: parts[node])
    for name, piece in pieces.named_children():
        if isinstance(piece, fx.GraphModule) and int(name.rpartition("_")[2]) not in eager:
            piece.compile()
    return pieces


def _parts(
    program: fx.GraphModule, modules: Mapping[str, nn.Module]
) -> tuple[dict[fx.Node, int], set[int]]:
    """The number of the part that each node belongs to, and which parts are not compiled."""
    parts: dict[fx.Node, int] = {}
    eager: set[int] = set()
    number = 0
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        wanted = _is_eager(node, modules)
        if wanted != (number in eager):
            number += 1
        if wanted:
            eager.add(number)
        parts[node] = number
    return parts, eager


def _is_eager(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is no computation, or takes one's result apart."""
    if node.op == "call_function" and node.name.startswith("getitem"):
        given = node.args[0]
        return isinstance(given, fx.Node) and _is_eager(given, modules)
    return node.op == "call_module" and isinstance(modules[str(node.target)], _EAGER)
