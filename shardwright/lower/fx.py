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
    Load,
    Program,
    Redistribute,
    RunModule,
    Uniform,
)

Made = Redistribute | Dropout | Uniform | Attention | RunModule  # instructions that modules run


def to_module(
    program: Program,
    device: torch.device,
    make: Callable[[Made], nn.Module],
) -> fx.GraphModule:
    """A module called with one tensor per leaf, in order, and then the random state.

    Parameters are given as local tiles in their atoms' shape, everything else
    whole. It returns the outputs, then the new contents of updated buffers.
    `make` gives the modules that redistribute and draw.
    """
    root, graph = nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {
        name: graph.placeholder(f"leaf_{i}") for i, name in enumerate(program.leaves)
    }
    random_state = graph.placeholder("random_state")
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Load):
            leaf = nodes[instruction.leaf]
            node = graph.call_method("view", (leaf, instruction.shape))
            nodes[instruction.result] = node
        elif isinstance(instruction, Redistribute):
            name = f"redistribute_{number}"
            root.add_module(name, make(instruction))
            node = graph.call_module(name, (nodes[instruction.value],))
            nodes[instruction.result] = node
        elif isinstance(instruction, Dropout | Uniform | Attention):
            name = f"{instruction.op.kind}_{number}"
            root.add_module(name, make(instruction))
            given = (*(nodes[operand] for operand in instruction.op.operands), random_state)
            nodes[instruction.op.outputs[0]] = graph.call_module(name, given)
        elif isinstance(instruction, RunModule):
            name = f"module_{number}"
            root.add_module(name, make(instruction))
            given = (*(nodes[operand] for operand in instruction.op.operands), random_state)
            node = graph.call_module(name, given)
            for i, result in enumerate(instruction.op.outputs):
                nodes[result] = graph.call_function(operator.getitem, (node, i))
        else:
            _compute(graph, instruction, nodes, device)
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
    if len(op.outputs) == 1 and op.outputs[0] == op.name:
        nodes[op.name] = node
        return
    for i, name in enumerate(op.outputs):
        nodes[name] = graph.call_function(operator.getitem, (node, i))
