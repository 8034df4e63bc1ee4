"""Compiles programs with `torch.compile`, cut at communication.

A graph that is compiled whole sends every parameter and sums every gradient by itself, and its
backward pass gives all gradients at its end. So buckets of parameters and of gradients stay as they
are, on their way while others compute, and what lies between them is compiled: what DDP does to a
module that is compiled (torch's `DDPOptimizer`). A piece has the operators of several buckets, as
each costs what the compiler cannot fuse, or has to save, across its ends. Sums of single numbers
that are under way while others compute stay outside, too: compiled they are waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from shardwright.ir.buckets import BUCKET_BYTES
from shardwright.runtime.comm.deferred_scalar_reduce import Awaited, is_under_way
from shardwright.runtime.parameters.all_gather_prefetch import Arrival, Departure
from shardwright.runtime.parameters.reshard_after_forward import ReshardAfterForward
from shardwright.runtime.parameters.unshard import Loading, Reduction
from shardwright.tracing.export.operators import OVERLOAD, operator_of

FIRST_BYTES = 2**20  # of parameters in the last piece at least: what DDP sends off first
_EAGER = (Loading, Reduction, Departure, Arrival, ReshardAfterForward, Awaited)


def compiled(program: fx.GraphModule) -> fx.GraphModule:
    """`program` with its pieces compiled; a program that sends nothing is one piece."""
    modules = dict(program.named_modules())
    parts, eager = _parts(program, modules)
    if not eager:
        program.compile()
        return program
    _out_of_place(program)
    _end_at_products(program, parts, eager)
    stays = {f"submod_{number}" for number in eager}
    pieces: fx.GraphModule = split_module(program, program, lambda node: parts[node])
    for name, piece in pieces.named_children():
        if isinstance(piece, fx.GraphModule) and name not in stays and _fuses(piece):
            piece.compile()
    return pieces


def _fuses(piece: fx.GraphModule) -> bool:
    """Whether there is something to fuse: looking up compiled code costs more than one operator."""
    return sum(node.op not in ("placeholder", "output") for node in piece.graph.nodes) > 1


def _parts(
    program: fx.GraphModule, modules: Mapping[str, nn.Module]
) -> tuple[dict[fx.Node, int], set[int]]:
    """The number of the part that each node belongs to, and which parts are not compiled.

    What brings parameters in, and sends nothing then, is done for several buckets at once; what is
    waited for is not waited for sooner.
    """
    parts: dict[fx.Node, int] = {}
    eager: set[int] = set()
    last = _last(program, modules)
    number, room, early = 0, 0, -1
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        wanted, size = _is_eager(node, modules), _bytes(node, modules)
        fixed = node is last or _is_wait(node, modules)
        if wanted and not fixed and _given_early(node, parts, early) and size <= room:
            room -= size
            parts[node] = early
            continue
        if wanted != (number in eager):
            number += 1
        if wanted:
            if number not in eager:
                early, room = number, BUCKET_BYTES
            eager.add(number)
            room -= size
        parts[node] = number
    return parts, eager


def _end_at_products(program: fx.GraphModule, parts: dict[fx.Node, int], eager: set[int]) -> None:
    """Elementwise operators at the end of a piece begin the next one.

    A compiler saves what they need in the backward pass, a mask of booleans of a ReLU, beside what
    they give; of what a piece is given it saves nothing twice.
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
    """Each operator `f_` becomes `f`, so that it does not matter when it runs.

    Nothing takes what it wrote over but from its result, and a compiler makes pieces functional.
    """
    for node in program.graph.nodes:
        if isinstance(node.target, OVERLOAD):
            namespace, kind, overload = str(node.target).split(".")
            if kind.endswith("_") and not kind.endswith("__"):  # as __and__ does
                node.target = operator_of(f"{namespace}.{kind[:-1]}.{overload}")
    program.recompile()


def _last(program: fx.GraphModule, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """What brings in the first of the last parameters, whose gradients are sent off first."""
    total, found = 0, None
    for node in reversed(program.graph.nodes):
        if (size := _bytes(node, modules)) and total < FIRST_BYTES:
            total, found = total + size, node
    return found


def _given_early(node: fx.Node, parts: Mapping[fx.Node, int], early: int) -> bool:
    """Whether all that it takes is there before what comes after part `early`."""
    return early >= 0 and all(parts.get(given, -1) <= early for given in node.all_input_nodes)


def _bytes(node: fx.Node, modules: Mapping[str, nn.Module]) -> int:
    """Of the tiles that a node brings in, in single precision."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    return sum(4 * prod(shape) for shape in module.shapes) if isinstance(module, Loading) else 0


def _is_wait(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], Awaited)


def _is_eager(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is no computation, or takes one's result apart."""
    if node.op == "call_function" and node.name.startswith("getitem"):
        given = node.args[0]
        return isinstance(given, fx.Node) and _is_eager(given, modules)
    if node.op != "call_module":
        return False
    return isinstance(modules[str(node.target)], _EAGER) or is_under_way(node, modules)
