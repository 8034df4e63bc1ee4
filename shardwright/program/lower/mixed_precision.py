"""Inserts casts of parameters that are stored in fp32 and computed with in bf16.

A parameter that is gathered from other ranks is cast to bf16 before the gather, so that half of the
bytes are sent, and its gradient is cast to fp32 before it is reduced. A tile that is read in its
stored layout is cast where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.ir.graph import Graph, Op, Ref, Source, Symbol
from shardwright.ir.options.mixed_precision import COMPUTE, MASTER, master_weights
from shardwright.program.instructions import (
    Compute,
    Instruction,
    Load,
    Program,
    RecomputedSegment,
    Redistribute,
    Shape,
    reads,
)


def with_casts(program: Program, graph: Graph) -> Program:
    """`program` for parameters in the dtype in which they are stored."""
    stored = master_weights(graph)
    if not stored:
        return program
    writer = _Writer(dict.fromkeys(stored, ()))
    writer.write(program.instructions)
    outputs = tuple(writer.narrow(name) for name in program.outputs)
    updates = tuple((buffer, writer.narrow(name)) for buffer, name in program.updates)
    found = tuple(writer.instructions)
    return replace(program, instructions=found, outputs=outputs, updates=updates)


@dataclass
class _Writer:
    """Instructions with casts among them; `wide` are the values in the wide dtype, by shape."""

    wide: dict[str, Shape]
    segment: str = ""  # what names in it end in
    instructions: list[Instruction] = field(default_factory=list)
    casts: dict[str, str] = field(default_factory=dict)

    def write(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self.instructions.append(self._rewritten(instruction))

    def narrow(self, name: str) -> str:
        """The name of a value in the dtype that operators take; cast once, where that is wanted."""
        if name not in self.wide:
            return name
        if name not in self.casts:
            result = self.casts[name] = f"{name}/cast{self.segment}"
            op = Op(
                result,
                "aten._to_copy.default",
                (Ref(name),),
                (("dtype", Symbol("dtype", COMPUTE)),),
                (result,),
                Source(),
            )
            self.instructions.append(Compute(op, (self.wide[name],)))
        return self.casts[name]

    def _rewritten(self, one: Instruction) -> Instruction:
        match one:
            case Load():
                if one.leaf in self.wide:
                    self.wide[one.result] = one.shape
                return one
            case Redistribute() if one.value not in self.wide:
                return one
            case Redistribute() if any(move.collective.moves_data for move in one.forward):
                return replace(one, cast=(COMPUTE, MASTER))
            case Redistribute():
                self._passed_on(one)
                return one
            case RecomputedSegment():
                inner = _Writer(dict(self.wide), f"{self.segment}/{one.number}")
                inner.write(one.instructions)
                self.wide.update((n, inner.wide[n]) for n in one.gives if n in inner.wide)
                return replace(one, instructions=tuple(inner.instructions))
            case _ if not any(name in self.wide for name in reads(one)):
                return one
        # One whose operands are named in its call.
        return replace(one, op=one.op.with_operands([self.narrow(n) for n in one.op.operands]))

    def _passed_on(self, one: Redistribute) -> None:
        if one.value in self.wide:
            self.wide[one.result] = one.after
