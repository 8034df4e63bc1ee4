"""Compiles programs with `torch.compile`, cut where copies of parameters are gathered again.

A region of a step program is compiled whole. In the program of a pipeline stage, operators that do
not keep their gathered copies are not compiled, and the parts between them are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from shardwright.runtime.parameters.reshard_after_forward import ReshardAfterForward
from shardwright.tracing.export.operators import OVERLOAD, operator_of


def compiled(program: fx.GraphModule) -> fx.GraphModule:
    """`program` with its parts compiled; a program without communication is one part."""
    modules = dict(program.named_modules())
    parts, eager = _parts(program, modules)
    if not eager:
        program.compile()
        return program
    _out_of_place(program)
    _end_at_products(program, parts, eager)
    stays = {f"submod_{number}" for number in eager}
    split: fx.GraphModule = split_module(program, program, lambda node: parts[node])
    for name, part in split.named_children():
        if isinstance(part, fx.GraphModule) and name not in stays and _fuses(part):
            part.compile()
    return split


def _fuses(part: fx.GraphModule) -> bool:
    """Whether there is something to fuse: looking up compiled code costs more than one operator."""
    return sum(node.op not in ("placeholder", "output") for node in part.graph.nodes) > 1


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


def _end_at_products(program: fx.GraphModule, parts: dict[fx.Node, int], eager: set[int]) -> None:
    """Move elementwise operators at the end of a part to the beginning of the next part.

    In their own part a compiler would save what their backward pass needs (e.g. a ReLU's boolean
    mask) in addition to their results; inputs of a part are not saved twice.
    """
    last = max(parts.values(), default=-1)
    for node in reversed(program.graph.nodes):
        following = parts.get(node, last) + 2  # the next one that is compiled
        if following > last or parts[node] in eager or not _is_elementwise(node):
            continue
        if all(parts.get(user, following) >= following for user in node.users):
            parts[node] = following


def _is_elementwise(node: fx.Node) -> bool:
    return isinstance(node.target, OVERLOAD) and torch.Tag.pointwise in node.target.tags


def _out_of_place(program: fx.GraphModule) -> None:
    """Replace each in-place operator `f_` by `f`, so that the order of operators does not matter.

    This is safe because only the result of `f_` is read afterwards. A compiler makes its parts
    functional in any case.
    """
    for node in program.graph.nodes:
        if isinstance(node.target, OVERLOAD):
            namespace, kind, overload = str(node.target).split(".")
            if kind.endswith("_") and not kind.endswith("__"):  # as __and__ does
                node.target = operator_of(f"{namespace}.{kind[:-1]}.{overload}")
    program.recompile()


def _is_eager(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is not compiled: a `ReshardAfterForward`, or a selection of its result."""
    if node.op == "call_function" and node.name.startswith("getitem"):
        given = node.args[0]
        return isinstance(given, fx.Node) and _is_eager(given, modules)
    if node.op != "call_module":
        return False
    return isinstance(modules[str(node.target)], ReshardAfterForward)
