"""Inserts casts of parameters that are stored in another dtype than the one they are read in.

A parameter that is stored in fp32 and gathered from other ranks is cast to bf16, or to 8 bits,
before the gather, so that fewer bytes are sent, and its gradient is cast to fp32 before it is
reduced. A tile that is read in its stored layout is cast where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwright.ir.graph import Graph, Op, Ref, Source, Symbol
from shardwright.ir.options.mixed_precision import read_dtype, stored_dtypes
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
    stored = stored_dtypes(graph)
    if not stored:
        return program
    casts = {name: (read_dtype(graph, name), dtype) for name, dtype in stored.items()}
    writer = _Writer(dict.fromkeys(stored, ()), casts)
    writer.write(program.instructions)
    outputs = tuple(writer.narrow(name) for name in program.outputs)
    updates = tuple((buffer, writer.narrow(name)) for buffer, name in program.updates)
    found = tuple(writer.instructions)
    return replace(program, instructions=found, outputs=outputs, updates=updates)


def cast_dtype(one: Instruction) -> str:
    """The dtype of the result of a cast of a parameter."""
    assert isinstance(one, Compute), one
    return str(dict(one.op.kwargs)["dtype"])


@dataclass
class _Writer:
    """Instructions with casts among them.

    `wide` are the values in the stored dtype, by shape, and `dtypes` those in which they are read
    and stored.
    """

    wide: dict[str, Shape]
    dtypes: dict[str, tuple[str, str]]
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
                (("dtype", Symbol("dtype", self.dtypes[name][0])),),
                (result,),
                Source(),
            )
            self.instructions.append(Compute(op, (self.wide[name],)))
        return self.casts[name]

    def _rewritten(self, one: Instruction) -> Instruction:
        """The instruction with the casts that it needs; tracks which values are still float32."""
        match one:
            case Load():
                if one.leaf in self.wide:
                    self.wide[one.result] = one.shape
                    self.dtypes[one.result] = self.dtypes[one.leaf]
                return one
            case Redistribute() if one.value not in self.wide:
                return one
            case Redistribute() if any(move.collective.moves_data for move in one.forward):
                return replace(one, cast=self.dtypes[one.value])
            case Redistribute():
                self._passed_on(one)
                return one
            case RecomputedSegment():
                inner = _Writer(dict(self.wide), dict(self.dtypes), f"{self.segment}/{one.number}")
                inner.write(one.instructions)
                given = [n for n in one.gives if n in inner.wide]
                self.wide.update((n, inner.wide[n]) for n in given)
                self.dtypes.update((n, inner.dtypes[n]) for n in given)
                return replace(one, instructions=tuple(inner.instructions))
            case _ if not any(name in self.wide for name in reads(one)):
                return one
        # One whose operands are named in its call.
        return replace(one, op=one.op.with_operands([self.narrow(n) for n in one.op.operands]))

    def _passed_on(self, one: Redistribute) -> None:
        if one.value in self.wide:
            self.wide[one.result] = one.after
            self.dtypes[one.result] = self.dtypes[one.value]
