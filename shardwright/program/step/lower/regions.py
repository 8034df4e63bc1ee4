"""Collects the distinct regions of a step program.

Layers and micro-batches repeat the same operators under other names. A region is written with
names of its own, so that equal stretches are one region, compiled and simulated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.ir.graph import Graph, Source
from shardwright.program.instructions import (
    CALLS,
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    Move,
    Redistribute,
    Uniform,
    reads,
    writes,
)
from shardwright.program.step.region import Region

_NOWHERE = Source()


class Used(NamedTuple):
    """The region of a stretch of operators, and its variant."""

    region: int
    variant: int


@dataclass
class RegionTable:
    """The distinct regions of a step; `fixed_offsets` tells apart tiles at other offsets."""

    fixed_offsets: bool = False
    regions: list[Region] = field(default_factory=list)
    _known: dict[object, int] = field(default_factory=dict)

    def add(
        self,
        instructions: Sequence[Instruction],
        inputs: Sequence[str],
        outputs: Sequence[str],
        trained: Iterable[bool],
        differentiable: Iterable[bool],
        dropped: Iterable[bool],
    ) -> Used:
        """Return the region of `instructions`; a new one is added."""
        names = {name: f"in{i}" for i, name in enumerate(inputs)}
        written: list[Instruction] = []
        for instruction in instructions:
            for name in writes(instruction):
                names[name] = f"v{len(names) - len(inputs)}"
            written.append(renamed(instruction, names))
        found = Region(
            (tuple(written),),
            tuple(names[name] for name in inputs),
            tuple(names[name] for name in outputs),
            tuple(trained),
            tuple(differentiable),
            tuple(dropped),
        )
        return self.use(found)

    def use(self, found: Region) -> Used:
        """The number and variant of a region of one variant."""
        (variant,) = found.variants
        form = variant if self.fixed_offsets else tuple(map(without_offsets, variant))
        key = replace(found, variants=(form,)), tuple(map(written_arguments, form))
        number = self._known.setdefault(key, len(self.regions))
        if number == len(self.regions):
            self.regions.append(found)
            return Used(number, 0)
        known = self.regions[number].variants
        if variant not in known:
            self.regions[number] = replace(found, variants=(*known, variant))
            return Used(number, len(known))
        return Used(number, known.index(variant))


def written_arguments(one: Instruction) -> str:
    """The arguments as text, in which 1, 1.0 and True differ, as their results may."""
    return str((one.op.args, one.op.kwargs)) if isinstance(one, CALLS) else ""


def with_prefix(
    instructions: Sequence[Instruction], given: Mapping[str, str], prefix: str
) -> tuple[list[Instruction], dict[str, str]]:
    """The instructions of a region, with inputs as `given`, and the new names of all its values."""
    names = dict(given)
    found: list[Instruction] = []
    for one in instructions:
        names.update((name, prefix + name) for name in writes(one))
        found.append(renamed(one, names))
    return found, names


def of_the_graph(
    instructions: Sequence[Instruction], ops: Sequence[str], graph: Graph
) -> tuple[list[Instruction], dict[str, str]]:
    """The instructions of a region as operators `ops` of `graph`, and the names of all values.

    Inputs keep their names; results have those that the graph has for them.
    """
    names: dict[str, str] = {}
    found: list[Instruction] = []
    for number, (one, name) in enumerate(zip(instructions, ops, strict=True)):
        made = writes(one)
        serial = graph.op.get(name)
        known = serial.outputs if serial is not None else [f"{number}/{local}" for local in made]
        names.update(zip(made, known, strict=True))
        one = renamed(one, {**{local: local for local in reads(one)}, **names})
        if isinstance(one, CALLS):
            source = serial.source if serial is not None else Source()
            one = replace(one, op=replace(one.op, name=name, source=source))
        found.append(one)
    return found, names


def renamed(one: Instruction, names: Mapping[str, str]) -> Instruction:
    """An instruction with other names of values, without its operator's position in the model."""
    if isinstance(one, Redistribute):
        return replace(one, value=names[one.value], result=names[one.result])
    assert isinstance(one, CALLS), "regions have operators and local redistributions"
    outputs = tuple(names[name] for name in writes(one))
    op = one.op
    name = outputs[0] if op.outputs == (op.name,) else f"{outputs[0]}/op"
    op = op.with_operands(
        [names[name] for name in reads(one)],
        name=name,
        outputs=outputs,
        source=_NOWHERE,
        saves=(),
        part_of="",
    )
    if isinstance(one, Compute) and one.regathers:
        return replace(one, op=op, regathers=())
    return replace(one, op=op)


def without_offsets(one: Instruction) -> Instruction:
    """An instruction with the offsets of its tiles set to zero."""
    if isinstance(one, Redistribute):
        return replace(one, forward=_moves(one.forward), backward=_moves(one.backward))
    if isinstance(one, Dropout | Uniform | Attention | DroppedMlp):
        lengths = tuple(
            tuple((0, length, size) for _, length, size in dim) for dim in one.positions
        )
        return replace(one, positions=lengths)
    return one


def _moves(moves: tuple[Move, ...]) -> tuple[Move, ...]:
    return tuple(replace(move, start=0, keeps=True) for move in moves)
