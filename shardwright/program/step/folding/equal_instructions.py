"""Compares instructions of a step program without regard to names and random numbers."""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.instructions import (
    Attention,
    Dropout,
    DroppedMlp,
    Instruction,
    RunModule,
    Uniform,
)
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Relayout,
    StepInstruction,
    Transfer,
    reads,
    writes,
)
from shardwright.program.step.region import Region
from shardwright.program.step.step_program import StepProgram


def is_same(program: StepProgram, one: StepInstruction, other: StepInstruction) -> bool:
    """Whether two instructions are equal but for names."""
    if type(one) is not type(other):
        return False
    return _form(one) == _form(other) and _same_regions(program, one, other)


def _form(one: StepInstruction) -> tuple[object, ...]:
    """An instruction without names and regions."""
    match one:
        case Forward():
            return len(one.inputs), one.saves, one.again, len(one.ops)
        case Backward():
            given = tuple(len(names) for names in one.given)
            made = tuple(bool(name) for name in one.made)
            at = tuple(at for at, _ in one.copies), tuple(at for at, _ in one.totals)
            return one.part, given, made, at
        case Transfer():
            parts = tuple((p.atoms, p.local, p.move, p.shape, p.dtype) for p in one.parts)
            return one.collective, one.channel, parts
        case HostCopy():
            return one.shape, one.dtype
        case Relayout():
            return one.atoms, one.local, one.shape, one.dtype
    return (len(reads(one)), len(writes(one)))


def _same_regions(program: StepProgram, one: StepInstruction, other: StepInstruction) -> bool:
    """Whether two runs are of regions that differ in random numbers at most."""
    if not isinstance(one, Forward | Backward) or not isinstance(other, Forward | Backward):
        return True
    a = one.variant if isinstance(one, Forward) else 0
    b = other.variant if isinstance(other, Forward) else 0
    if one.region == other.region:
        return a == b
    first, second = program.regions[one.region], program.regions[other.region]
    return _without_numbers(first, a) == _without_numbers(second, b)


def _without_numbers(region: Region, variant: int) -> Region:
    """A variant of a region without the numbers that tell random operators apart."""
    return replace(region, variants=(tuple(map(_numberless, region.variants[variant])),))


def _numberless(one: Instruction) -> Instruction:
    if isinstance(one, Dropout | Uniform):
        return replace(one, op=replace(one.op, args=one.op.args[:-1]))
    if isinstance(one, Attention | DroppedMlp | RunModule):
        return replace(one, number=0)
    return one
