"""Simulates the memory of a region: every tensor's lifetime in eager torch's order.

Forward, a value lives until its last reader has run or, where autograd saves
it, until that operator's backward pass. The backward pass goes through the
operators in reverse, which is autograd's order: a node runs when all readers of
its results have run. The memory of single operator calls comes from an `OpTracer`, that of
redistributions from `redistribution.py`, and the workspace of kernels from `workspaces.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import final

from shardwright.ir.graph import Op, Ref
from shardwright.ir.op_memory import (
    BackwardMemory,
    CallMemory,
    ForwardMemory,
    Seen,
    contiguous_strides,
)
from shardwright.ir.options.fp8 import FLOAT8
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    Joint,
    Redistribute,
    RunModule,
    Shape,
    SharedAttention,
    Uniform,
)
from shardwright.program.step.instructions import Gradients
from shardwright.rules.operators.loss_chunks import LINEAR_CROSS_ENTROPY
from shardwright.simulate.memory.allocator import Block, Use
from shardwright.simulate.memory.instructions import (
    attention,
    draw,
    is_fused,
    local_shapes,
    stated,
)
from shardwright.simulate.memory.mixture import local_experts
from shardwright.simulate.memory.tape import Tape
from shardwright.simulate.memory.values import View
from shardwright.simulate.memory.workspaces import inside


@final
class MemorySimulator(Tape):
    """Runs a region on a `Tape`, forward and backward."""

    def run(self, instruction: Instruction) -> None:
        """Simulate one instruction of the forward pass."""
        allocator = self.allocator
        allocator.module = self.module(instruction)
        match instruction:
            case Compute():  # first, as most are
                allocator.where = f"{self.label(instruction.op)}, forward"
                if is_fused(self, instruction.op):
                    attention(self, instruction.op)
                elif instruction.routing is not None:
                    local_experts(self, instruction)
                else:
                    self.compute(instruction)
            case Redistribute():
                allocator.where = f"redistribution of {instruction.value}, forward"
                self.redistribute(instruction)
            case Dropout() | Uniform():
                allocator.where = f"{self.label(instruction.op)}, forward"
                draw(self, instruction)
            case DroppedMlp():
                allocator.where = f"{self.label(instruction.op)}, forward"
                self.compute(Compute(self.with_keys(instruction), instruction.shapes))
            case Joint() if instruction.op.target == LINEAR_CROSS_ENTROPY:
                # On its tile it allocates what the plain call does.
                allocator.where = f"{self.label(instruction.op)}, forward"
                self.compute(Compute(instruction.op, instruction.shapes))
            case Joint() | RunModule() | Attention() | SharedAttention():
                allocator.where = f"{self.label(instruction.op)}, forward"
                stated(self, instruction.op, local_shapes(self, instruction), instruction)

    def with_keys(self, one: DroppedMlp) -> Op:
        """The operator of an MLP with the keys that its dropout draws by, which the module has."""
        *rows, columns = (prod(length for _, length, _ in dim) for dim in one.positions)
        refs = []
        shapes: Mapping[str, Shape] = {"rows": (prod(rows),), "columns": (columns,), "key": ()}
        for name, shape in shapes.items():
            refs.append(Ref(f"{one.op.name}/{name}"))
            block = self.allocator.new(0, Use.LASTING)
            self.views[refs[-1].name] = View(block, shape, contiguous_strides(shape), "int32")
        return replace(one.op, args=(*one.op.args, one.number, tuple(refs)))

    def compute(self, one: Compute) -> None:
        """Simulate an operator by the memory of its traced torch call."""
        op = one.op
        names = tuple(dict.fromkeys(op.operands))
        views = [self.views[name] for name in names]
        in_8_bit = op.name in self.fp8.layers
        traced = [views[0].dtype if in_8_bit and v.dtype == FLOAT8 else v.dtype for v in views]
        given = tuple(
            Seen(v.shape, v.strides, dtype, v.grad and self.saving)
            for v, dtype in zip(views, traced, strict=True)
        )
        call = self.book.call(op, names, given)
        seen = call.forward
        if seen is None:
            stated(self, op, one.shapes, one)
            return
        blocks = [view.block for view in views]
        kernel = inside(op, given, seen, self.rank)
        multiplied = views[:2] if in_8_bit else ()
        copies = sum(self.fp8.copy(view) for view in multiplied if view.dtype != FLOAT8)
        if op.name not in self.fusions:
            self.allocator.briefly(seen.peak + kernel.forward + copies)
        stays = {result[0] for result in seen.results if result is not None} | {*seen.saved}
        stays -= self.inside_of_kernel(op, seen)
        for number, size in enumerate(seen.made, len(names)):  # the others are gone, see the peak
            blocks.append(self.allocator.new(size if number in stays else 0))
        for name, result in zip(op.outputs, seen.results, strict=True):
            if result is not None:
                number, shape, strides, dtype = result
                known = self.graph.tensor.get(name)  # casts of parameters are not in the graph
                grad = any(v.grad for v in views) and (known is None or known.requires_grad)
                self.allocator.own(blocks[number])
                self.views[name] = View(blocks[number], shape, strides, dtype, grad)
        saved: dict[int, Block] = {}
        if self.saving:
            for number in seen.saved:
                if number == 0 and in_8_bit and self.fp8.saves:
                    if self.fp8.layers[op.name]:
                        blocks.append(self.allocator.new(self.fp8.copy(views[0])))
                        saved[0] = self.allocator.save(blocks[-1])
                elif id(blocks[number]) not in self.given_again:
                    saved[number] = self.allocator.save(blocks[number])
            for number in self.read_again(op, names):
                if number not in saved and id(blocks[number]) not in self.given_again:
                    saved[number] = self.allocator.save(blocks[number])
        for block in blocks[len(names) :]:
            self.allocator.drop(block)
        if not any(self.views[n].grad for n in op.outputs if n in self.views):
            for block in saved.values():
                self.allocator.unsave(block)
            return
        if in_8_bit:  # a gathered weight in the other layout, and the result's gradient in both
            turned = [view for view in multiplied if view.dtype == FLOAT8]
            copies += 0 if self.fp8.turns_weights else sum(map(self.fp8.copy, turned))
            copies += 2 * sum(self.fp8.copy(self.views[name]) for name in op.outputs)
        self.backward_of(op, call, given, blocks, saved, kernel.backward + copies)

    def inside_of_kernel(self, op: Op, seen: ForwardMemory) -> set[int]:
        """The results of a call that stay in the registers of a fused kernel, by their number."""
        results = zip(op.outputs, seen.results, strict=True)
        return {one[0] for name, one in results if one is not None and name in self.unwritten}

    def written(self, names: Sequence[str], behind: BackwardMemory) -> set[int]:
        """The numbers of gradients that a fused kernel writes: those of what it has read."""
        found = zip(names, behind.gradients, strict=True)
        return {one[0] for name, one in found if one is not None and name not in self.unwritten}

    def read_again(self, op: Op, names: Sequence[str]) -> list[int]:
        """The operands from which a fused kernel computes again what it did not write.

        The compiler keeps them for the backward pass, instead of results inside of the kernel.
        """
        if self.unwritten.isdisjoint(op.outputs):
            return []
        return [number for number, name in enumerate(names) if name not in self.unwritten]

    def _part_of(
        self, op: Op, names: Sequence[str], given: tuple[Seen, ...], weights: bool
    ) -> CallMemory:
        """The call of an operator that computes gradients of weights alone, or of inputs alone."""
        wanted = tuple(
            seen._replace(
                requires_grad=seen.requires_grad and (name in self.from_weights) is weights
            )
            for seen, name in zip(given, names, strict=True)
        )
        return self.book.call(op, names, wanted)

    def backward_of(
        self,
        op: Op,
        whole: CallMemory,
        given: tuple[Seen, ...],
        blocks: Sequence[Block],
        saved: Mapping[int, Block],
        inside: int,
    ) -> None:
        """The node of an operator, whose operands and results are `blocks`, some of them `saved`.

        `inside` is the workspace of its kernel, in bytes.
        """
        names = tuple(dict.fromkeys(op.operands))
        arrived: list[View | None] = []

        def back() -> None:
            first = self.part is Gradients.INPUTS and not self.from_weights.isdisjoint(names)
            second = self.part is Gradients.WEIGHTS and bool(arrived)
            came = list(arrived) if second else [self.taken(name) for name in op.outputs]
            if first:
                arrived.extend(came)
                for one in came:
                    if one is not None:
                        self.allocator.own(one.block)  # for the second part
            if second:
                self.hold(came)
            left = {} if second else dict(saved)
            if all(gradient is None for gradient in came):
                for block in left.values():
                    self.unsave(block)
                return
            call = self._part_of(op, names, given, second) if first or second else whole
            assert call.forward is not None, "the operator has run"
            base = len(names) + len(call.forward.made)
            behind = call.backward(tuple(None if g is None else g.strides for g in came))
            known = [g.block for g in came if g is not None]
            alive: dict[int, Block] = {}
            self.allocator.briefly(inside)
            births = iter(known)
            written = None if op.name not in self.fusions else self.written(names, behind)
            for number, size in behind.events:
                if size >= 0:
                    given_back = next(births, None)
                    size = size if written is None or number in written else 0
                    alive[number] = self.allocator.new(size) if given_back is None else given_back
                elif number in alive:
                    self.allocator.drop(alive.pop(number))
                elif number in left and number not in alive:
                    self.unsave(left.pop(number))
            for block in left.values():
                self.unsave(block)
            home = []
            for name, found, view in zip(names, behind.gradients, given, strict=True):
                if found is not None:
                    number, how_strides = found
                    block = alive[number] if number >= base else blocks[number]
                    self.allocator.own(block)
                    home.append((name, View(block, view.shape, how_strides, view.dtype)))
            for block in alive.values():
                self.allocator.drop(block)
            for name, gradient_view in home:
                self.give(name, gradient_view)

        self.node(self.label(op), op.outputs, back)
