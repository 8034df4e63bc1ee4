"""A program as a `torch.fx.GraphModule`, which runs eagerly or through `torch.compile`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx, nn

from shardwright.capture.operators import operator_of, to_torch
from shardwright.lower.program import (
    Attention,
    Compute,
    Dropout,
    Fetch,
    Instruction,
    Load,
    Program,
    Redistribute,
    Reduce,
    RunModule,
    Uniform,
    reads,
    writes,
)

Draws = Dropout | Uniform | Attention | RunModule  # those that take the random state
Special = Draws | Redistribute | Fetch | Reduce  # those that need a module each


def to_module(
    program: Program, device: torch.device, make: Callable[[Special], nn.Module]
) -> fx.GraphModule:
    """A module called with one tensor per leaf, in order, and then the random state.

    Parameters are given as they are stored, in their atoms' shape (without
    `Fetch`: as local tiles), everything else whole. It returns the outputs,
    then the new contents of updated buffers. `make` gives the modules of the
    instructions that are no operators.
    """
    root, graph = nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {
        name: graph.placeholder(f"leaf_{i}") for i, name in enumerate(program.leaves)
    }
    random_state = graph.placeholder("random_state")
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Compute):
            _compute(graph, instruction, nodes, device)
            continue
        if isinstance(instruction, Load):
            leaf = nodes[instruction.leaf]
            nodes[instruction.result] = graph.call_method("view", (leaf, instruction.shape))
            continue
        name = f"{type(instruction).__name__.lower()}_{number}"
        root.add_module(name, make(instruction))
        given = [nodes[name] for name in reads(instruction)]
        if isinstance(instruction, Draws):
            given.append(random_state)
        _name(graph, graph.call_module(name, tuple(given)), instruction, nodes)
    results = [*program.outputs, *(value for _, value in program.updates)]
    graph.output(tuple(nodes[name] for name in results))
    graph.lint()
    return fx.GraphModule(root, graph, class_name="Program")


def _compute(
    graph: fx.Graph, instruction: Compute, nodes: dict[str, fx.Node], device: torch.device
) -> None:
    op = instruction.op
    args = tuple(to_torch(a, nodes, device) for a in op.args)
    kwargs = {key: to_torch(value, nodes, device) for key, value in op.kwargs}
    node = graph.call_function(operator_of(op.target), args, kwargs)
    _name(graph, node, instruction, nodes)


def _name(
    graph: fx.Graph, node: fx.Node, instruction: Instruction, nodes: dict[str, fx.Node]
) -> None:
    """Note which node has which of the values that an instruction defines."""
    names = writes(instruction)
    together = isinstance(instruction, Fetch | Reduce | RunModule)
    if isinstance(instruction, Compute):
        together = names != (instruction.op.name,)
    if not together:
        nodes[names[0]] = node
        return
    for i, name in enumerate(names):
        nodes[name] = graph.call_function(operator.getitem, (node, i))
