"""Simulates the memory of a region: every tensor's lifetime in eager torch's order.

Forward, a value lives until its last reader has run or, where autograd saves
it, until that operator's backward pass. The backward pass goes through the
operators in reverse, which is autograd's order: a node runs when all that read
its results have. What single operators do is `Footprints`' matter, what
redistributions need `moving`'s, and what kernels take inside `kernels`'.
"""

from __future__ import annotations

from typing import final

from shardwright.ir.op_memory import Seen
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    Instruction,
    Joint,
    Redistribute,
    RunModule,
    SharedAttention,
    Uniform,
)
from shardwright.simulate.memory.allocator import Block
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
        """One instruction forward."""
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
            case Joint() | RunModule() | Attention() | SharedAttention():
                allocator.where = f"{self.label(instruction.op)}, forward"
                stated(self, instruction.op, local_shapes(self, instruction), instruction)

    def compute(self, one: Compute) -> None:
        """An operator as torch runs it."""
        op = one.op
        names = tuple(dict.fromkeys(op.operands))
        views = [self.views[name] for name in names]
        given = tuple(Seen(v.shape, v.strides, v.dtype, v.grad and self.saving) for v in views)
        call = self.book.call(op, names, given)
        seen = call.forward
        if seen is None:
            stated(self, op, one.shapes, one)
            return
        blocks = [view.block for view in views]
        kernel = inside(op, given, seen, self.rank)
        self.allocator.briefly(seen.peak + kernel.forward)
        for size in seen.made:
            blocks.append(self.allocator.new(size))
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
                if id(blocks[number]) not in self.given_again:
                    saved[number] = self.allocator.save(blocks[number])
        for block in blocks[len(names) :]:
            self.allocator.drop(block)
        if not any(self.views[n].grad for n in op.outputs if n in self.views):
            for block in saved.values():
                self.allocator.unsave(block)
            return
        base = len(blocks)

        def back() -> None:
            came = [self.taken(name) for name in op.outputs]
            if all(gradient is None for gradient in came):
                for block in saved.values():
                    self.allocator.unsave(block)
                return
            strides = tuple(None if g is None else g.strides for g in came)
            behind = call.backward(strides)
            known = [g.block for g in came if g is not None]
            alive: dict[int, Block] = {}
            left = dict(saved)
            self.allocator.briefly(kernel.backward)
            births = iter(known)
            for number, size in behind.events:
                if size >= 0:
                    given_back = next(births, None)
                    alive[number] = self.allocator.new(size) if given_back is None else given_back
                elif number in alive:
                    self.allocator.drop(alive.pop(number))
                elif number in left and number not in alive:
                    self.allocator.unsave(left.pop(number))
            for block in left.values():
                self.allocator.unsave(block)
            home = []
            for name, gradient, view in zip(names, behind.gradients, given, strict=True):
                if gradient is not None:
                    number, how_strides = gradient
                    block = alive[number] if number >= base else blocks[number]
                    self.allocator.own(block)
                    home.append((name, View(block, view.shape, how_strides, view.dtype)))
            for block in alive.values():
                self.allocator.drop(block)
            for name, gradient_view in home:
                self.give(name, gradient_view)

        self.node(self.label(op), op.outputs, back)
