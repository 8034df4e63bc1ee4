"""Writes results over operands that have no further reader.

Capture makes every operator functional, including `ReLU(inplace=True)`. If the operand has no
further reader and autograd does not save it, the operator's in-place form computes the same values
without new memory.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Graph, Op, Ref
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    Joint,
    Program,
    RecomputedSegment,
    RunModule,
    SharedAttention,
    Uniform,
    reads,
    writes,
)
from shardwright.rules.operators.inplace_forms import in_place_form, is_pointwise

# Of the operators that are not elementwise, those whose result is never a view
# of something inside them: autograd would pay more for writing to a view than a
# new tensor costs. Of a linear layer or a `matmul` that holds for matrices only.
_OWN_RESULT = ("conv1d", "conv2d", "conv3d", "convolution", "mm", "bmm", "addmm", "cat")

# Instructions that may keep what they read, or read it again, or return a view of it.
_OPAQUE = (RunModule, RecomputedSegment)
_CALLS = (Compute, Dropout, Uniform, Attention, DroppedMlp, Joint, SharedAttention)


def in_place(program: Program, graph: Graph) -> Program:
    """`program` with elementwise operators in place where this changes no result.

    An operator `y = f(x, ...)` may overwrite x if y has the shape and dtype of x, and if x,
    including all values that share its memory, is not a leaf, is read only here, is not returned
    and is not saved for a backward pass. A compiled graph must not end between x and y either,
    because a compiler may save any of its results for the backward pass.
    """
    memory = _memory(program, graph)
    kept = {memory[name] for name in _saved(program, graph) if name in memory}
    for one in program.instructions:
        if isinstance(one, _OPAQUE):
            kept.update(memory[name] for name in (*reads(one), *writes(one)))
    last = _last_reads(program, memory)
    made: dict[str, Compute] = {}
    found: list[Instruction] = []
    for at, instruction in enumerate(program.instructions):
        if _ends_graph(instruction, graph):
            made.clear()
        elif isinstance(instruction, Compute):
            form = _form(instruction, made, graph)
            if form is not None:
                over = form.operands[0]
                same = [name for name in form.operands if memory[name] == memory[over]]
                if len(same) == 1 and last[memory[over]] == at and memory[over] not in kept:
                    instruction = replace(instruction, op=form)
            made.update((name, instruction) for name in instruction.op.outputs)
        found.append(instruction)
    return replace(program, instructions=tuple(found))


def _ends_graph(instruction: Instruction, graph: Graph) -> bool:
    """Whether `torch.compile` may have to run this by itself, between two graphs."""
    if isinstance(instruction, Compute):
        return instruction.routing is not None
    if isinstance(instruction, Attention | Dropout):
        return graph.numerics.rng == "fast"
    return isinstance(instruction, (SharedAttention, *_OPAQUE))


def _form(instruction: Compute, made: dict[str, Compute], graph: Graph) -> Op | None:
    """The call in its in-place form, if there is one and its operand has the result's form."""
    op = instruction.op
    if not op.args or not isinstance(op.args[0], Ref) or len(op.outputs) != 1:
        return None
    name, result = op.args[0].name, op.outputs[0]
    producer = made.get(name)
    if name not in graph.tensor or result not in graph.tensor:
        return None  # a cast of a parameter
    if producer is None or not _makes_its_own(producer, graph):
        return None
    if producer.shapes != instruction.shapes:
        return None
    if graph.tensor[name].dtype != graph.tensor[result].dtype:
        return None
    form = in_place_form(op.target)
    return replace(op, target=form) if form is not None else None


def _makes_its_own(instruction: Compute, graph: Graph) -> bool:
    """Whether the one result is a tensor of its own for autograd, not a view."""
    op = instruction.op
    if len(op.outputs) != 1 or graph.tensor[op.outputs[0]].alias_of:
        return False
    if op.kind == "lerp":  # running statistics, which the kernel of a batch norm may keep
        return False
    if op.kind in ("linear", "matmul"):
        return len(instruction.shapes[0]) == 2
    return op.kind in _OWN_RESULT or is_pointwise(op.target)


def _memory(program: Program, graph: Graph) -> dict[str, str]:
    """For each value, the first of those that may share its memory."""
    memory = {name: name for name in program.leaves}
    for instruction in program.instructions:
        if isinstance(instruction, (Attention, DroppedMlp, Joint, SharedAttention, *_OPAQUE)):
            memory.update((name, name) for name in writes(instruction))
        elif isinstance(instruction, Compute | Uniform):
            given = _given(instruction.op, graph)
            for name in writes(instruction):
                known = graph.tensor.get(name)  # casts of parameters are not in the graph
                alias_of = known.alias_of if known else ""
                memory[name] = memory[given[alias_of]] if alias_of else name
        else:  # a redistribution may have nothing to move, dropout nothing to drop
            taken = (memory[name] for name in reads(instruction))
            memory.update(zip(writes(instruction), taken, strict=True))
    return memory


def _given(op: Op, graph: Graph) -> dict[str, str]:
    """The operands of an operator of the program, by their names in the graph."""
    return dict(zip(_serial(op, graph).operands, op.operands, strict=False))


def _serial(op: Op, graph: Graph) -> Op:
    """The operator of the graph; of a cast of a parameter, the cast itself."""
    return graph.producer.get(op.outputs[0], op)


def _saved(program: Program, graph: Graph) -> set[str]:
    """The values that autograd keeps for the backward pass."""
    found: set[str] = set()
    for instruction in program.instructions:
        if isinstance(instruction, _CALLS):
            given = _given(instruction.op, graph)
            saves = _serial(instruction.op, graph).saves
            found.update(given.get(name, name) for name in saves)
    return found


def _last_reads(program: Program, memory: dict[str, str]) -> dict[str, int]:
    """For each memory, where it is read last; beyond the end if it is a leaf's or returned."""
    last: dict[str, int] = {}
    for at, instruction in enumerate(program.instructions):
        last.update((memory[name], at) for name in reads(instruction))
    returned = (*program.outputs, *(value for _, value in program.updates))
    last.update((memory[name], len(program.instructions)) for name in (*program.leaves, *returned))
    return last
