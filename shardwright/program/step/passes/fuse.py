"""Fuses adjacent regions that no communication separates any more.

Lowering cuts regions wherever a parameter is communicated. Once transfers are in buckets, all
regions between two buckets become one, with one autograd graph and one compiled function.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.program.instructions import Instruction
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Gradients,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
)
from shardwright.program.step.lower.regions import RegionTable, Used, with_prefix
from shardwright.program.step.step_program import StepProgram

Sink = tuple[object, ...]  # what a gradient is added to


def fuse(program: StepProgram) -> StepProgram:
    """`program` with regions that follow each other, forward and backward, in one."""
    chains = _chains(program)
    if not chains:
        return program
    fusion = _Fusion(program, chains)
    instructions = tuple(fusion.written())
    return replace(program, instructions=instructions, regions=tuple(fusion.table.regions))


def _stretch(call: str) -> tuple[str, str]:
    """The part of a call's name that all micro-batches share, and the micro-batch."""
    name, _, batch = call.partition("@")
    return name, batch


def _chains(program: StepProgram) -> list[tuple[str, ...]]:
    """Runs of calls, named without their micro-batch, that are one region each in every one."""
    hard = [one for one in program.instructions if not isinstance(one, Accumulate)]
    follows: dict[tuple[str, bool], str] = {}  # call, whether it repeats another -> the next
    behind: dict[tuple[str, Gradients], str] = {}  # call, part -> the one whose part is next
    runs: dict[str, Forward] = {}
    backward: defaultdict[str, set[Gradients]] = defaultdict(set)
    dropped: defaultdict[str, set[int]] = defaultdict(set)  # inputs that exist again for backward
    for one in hard:
        if isinstance(one, Backward):
            backward[one.call].add(one.part)
            dropped[one.call].update(at for at, _ in one.copies)
    again = {one.call for one in hard if isinstance(one, Forward) and one.again}
    for one, following in itertools.pairwise(hard):
        match one, following:
            case Forward(), Forward() if one.again == following.again:
                follows[one.call, one.again] = following.call
            case Backward(), Backward() if one.part is following.part:
                behind[one.call, one.part] = following.call
    batches: defaultdict[str, list[str]] = defaultdict(list)
    for one in hard:
        if isinstance(one, Forward) and not one.again:
            runs[one.call] = one
            name, batch = _stretch(one.call)
            batches[name].append(batch)

    def fits(chain: Sequence[str], second: str) -> bool:
        """Whether the calls `second` can follow `chain` in one region, in every micro-batch."""
        first = chain[-1]
        if batches[first] != batches[second]:
            return False
        for batch in batches[first]:
            a, b = _call(first, batch), _call(second, batch)
            made = {name for one in chain for name in runs[_call(one, batch)].outputs}
            if any(runs[b].inputs[at] in made for at in dropped[b]):
                return False  # inside of the chain it would not be dropped
            if follows.get((a, False)) != b or backward[a] != backward[b]:
                return False
            if runs[a].saves != runs[b].saves:
                return False
            if (a in again) != (b in again) or (a in again and follows.get((a, True)) != b):
                return False
            if any(behind.get((b, part)) != a for part in backward[a]):
                return False
            if any(program.regions[runs[one].region].communicates for one in (a, b)):
                return False
        return True

    found: list[list[str]] = []
    for name in batches:
        if found and fits(found[-1], name):
            found[-1].append(name)
        else:
            found.append([name])
    return [tuple(chain) for chain in found if len(chain) > 1]


def _call(name: str, batch: str) -> str:
    return f"{name}@{batch}" if batch else name


class _Wiring(NamedTuple):
    """Inputs and outputs of a chain, by value, with the members that they belong to.

    Chains of equal regions with an equal `form` are equal regions.
    """

    values: tuple[str, ...]
    out_values: tuple[str, ...]
    positions: dict[tuple[str, int], int]  # of an input of a member, that of the whole
    exits: dict[tuple[str, int], int]  # of an output of a member, that of the whole
    form: tuple[tuple[int, ...], tuple[bool, ...]]


@dataclass
class _Fused:
    """One micro-batch's run of a chain: its region, and how it is wired."""

    number: int
    variant: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    positions: dict[tuple[str, int], int]  # of an input of a member, that of the whole
    exits: dict[tuple[str, int], int]  # of an output of a member, that of the whole


class _Fusion:
    """The program while chains are replaced by single calls."""

    def __init__(self, program: StepProgram, chains: Sequence[tuple[str, ...]]) -> None:
        self.program = program
        self.table = RegionTable(program.fixed_offsets)
        self.chain = {name: chain for chain in chains for name in chain}
        instructions = program.instructions
        self.forward = {
            one.call: one for one in instructions if isinstance(one, Forward) and not one.again
        }
        self.again = {
            one.call: one for one in instructions if isinstance(one, Forward) and one.again
        }
        self.backward: defaultdict[str, dict[Gradients, Backward]] = defaultdict(dict)
        for one in instructions:
            if isinstance(one, Backward):
                self.backward[one.call][one.part] = one
        self.sinks = _sinks(instructions)
        self.readers: defaultdict[str, set[str]] = defaultdict(set)  # value -> calls, "" others
        for one in instructions:
            for name in reads(one):
                self.readers[name].add(one.call if isinstance(one, Forward) else "")
        for name in program.returned:
            self.readers[name].add("")
        self.known: dict[object, Used] = {}  # regions of chains that are wired equally
        self.fused: dict[str, _Fused] = {}  # by the first call of the chain
        self.merged: dict[str, str] = {}  # gradient -> the one that has it now

    def written(self) -> list[StepInstruction]:
        """All instructions."""
        found: list[StepInstruction] = []
        for one in self.program.instructions:
            match one:
                case Forward() | Backward() if _stretch(one.call)[0] in self.chain:
                    calls = self.members(one.call)
                    first = calls[0] if isinstance(one, Forward) else calls[-1]
                    if one.call == first:
                        found.append(self.whole(one, calls))
                case Forward():
                    found.append(self.alone(one))
                case Backward():
                    found.append(replace(one, region=self.alone(self.forward[one.call]).region))
                case _:
                    found.append(one)
        return [kept for one in found if (kept := self.without_merged(one)) is not None]

    def members(self, call: str) -> list[str]:
        name, batch = _stretch(call)
        return [_call(one, batch) for one in self.chain[name]]

    def alone(self, one: Forward) -> Forward:
        """A call that stays as it is, of a region with another number."""
        region = self.program.regions[one.region]
        variant = (region.variants[one.variant],)
        number, variant_number = self.table.use(replace(region, variants=variant))
        return replace(one, region=number, variant=variant_number)

    def whole(self, one: Forward | Backward, calls: Sequence[str]) -> StepInstruction:
        """The call, or the backward pass, of a whole chain."""
        fused = self.fused.get(calls[0])
        if fused is None:
            fused = self.fused[calls[0]] = self.fusion_of(calls)
        if isinstance(one, Backward):
            return self.backward_of(fused, calls, one.part)
        parts = [(self.again if one.again else self.forward)[call] for call in calls]
        made = {name for part in parts for name in part.outputs}
        inputs = [""] * len(fused.inputs)
        outputs = [""] * len(fused.outputs)
        for part in parts:
            for i, name in enumerate(part.inputs):
                if name not in made:
                    inputs[fused.positions[part.call, i]] = name
            for i, name in enumerate(part.outputs):
                if (part.call, i) in fused.exits:
                    outputs[fused.exits[part.call, i]] = name
        return replace(
            one,
            region=fused.number,
            variant=fused.variant,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            ops=tuple(op for part in parts for op in part.ops),
        )

    def fusion_of(self, calls: Sequence[str]) -> _Fused:
        """The region of a chain."""
        parts = [self.forward[call] for call in calls]
        wiring = self.wiring_of(parts)
        regions = tuple((part.region, part.variant) for part in parts)
        key = regions, wiring.form
        used = self.known.get(key)
        if used is None:
            used = self.known[key] = self.region_of(parts, wiring)
        return _Fused(used.region, used.variant, *wiring[:4])

    def wiring_of(self, parts: Sequence[Forward]) -> _Wiring:
        """The connections of a chain's members to each other and to what is around them."""
        inside = {part.call for part in parts}
        made: dict[str, int] = {}  # value made in the chain -> its number
        taken: dict[tuple[str, Sink], int] = {}
        values: list[str] = []
        positions: dict[tuple[str, int], int] = {}
        exits: dict[tuple[str, int], int] = {}
        out_values: list[str] = []
        sources: list[int] = []  # of each input: of the whole, or ~ the number of the value made
        leaving: list[bool] = []  # of each output
        for part in parts:
            gradients = _made(self.backward[part.call].values(), len(part.inputs))
            for i, value in enumerate(part.inputs):
                if value in made:
                    sources.append(~made[value])
                    continue
                key = value, self.sinks.get(gradients[i], ()) if gradients[i] else ()
                if key not in taken:
                    taken[key] = len(values)
                    values.append(value)
                positions[part.call, i] = taken[key]
                sources.append(taken[key])
            again = self.again.get(part.call)
            for i, value in enumerate(part.outputs):
                made[value] = len(made)
                seen = self.readers[value] | (self.readers[again.outputs[i]] if again else set())
                leaving.append(bool(seen - inside))
                if leaving[-1]:
                    exits[part.call, i] = len(out_values)
                    out_values.append(value)
        form = tuple(sources), tuple(leaving)
        return _Wiring(tuple(values), tuple(out_values), positions, exits, form)

    def region_of(self, parts: Sequence[Forward], wiring: _Wiring) -> Used:
        """The region of a chain of calls that are wired so."""
        count = len(wiring.values)
        names = [f"in{i}" for i in range(count)]
        trained, dropped = [False] * count, [False] * count
        instructions: list[Instruction] = []
        made: list[str] = []  # names of the values made in the chain
        outputs: list[str] = []
        differentiable: list[bool] = []
        sources, leaving = map(iter, wiring.form)
        for part in parts:
            region = self.program.regions[part.region]
            given: dict[str, str] = {}
            for i, local in enumerate(region.inputs):
                at = next(sources)
                given[local] = made[~at] if at < 0 else names[at]
                if at >= 0:
                    trained[at] |= region.trained[i]
                    dropped[at] |= region.dropped[i]
            mine, local_names = with_prefix(region.variants[part.variant], given, f"{part.call}.")
            instructions += mine
            for i, local in enumerate(region.outputs):
                made.append(local_names[local])
                if next(leaving):
                    outputs.append(made[-1])
                    differentiable.append(region.differentiable[i])
        return self.table.add(instructions, names, outputs, trained, differentiable, dropped)

    def backward_of(self, fused: _Fused, calls: Sequence[str], part: Gradients) -> Backward:
        """The backward pass of a chain, or a part of it."""
        inside = {name for call in calls for name in self.backward[call][part].made if name}
        given: list[tuple[str, ...]] = [()] * len(fused.outputs)
        made = [""] * len(fused.inputs)
        copies: dict[int, str] = {}
        for call in reversed(calls):
            one = self.backward[call][part]
            for i, names in enumerate(one.given):
                if (call, i) in fused.exits:
                    given[fused.exits[call, i]] = tuple(n for n in names if n not in inside)
            for i, name in enumerate(one.made):
                if not name or (call, i) not in fused.positions:
                    continue
                at = fused.positions[call, i]
                if made[at]:
                    self.merged[name] = made[at]
                else:
                    made[at] = name
            for i, name in one.copies:
                copies[fused.positions[call, i]] = name
        return Backward(
            fused.number,
            calls[0],
            () if part is Gradients.WEIGHTS else tuple(given),
            tuple(made),
            tuple(sorted(copies.items())),
            part=part,
        )

    def without_merged(self, one: StepInstruction) -> StepInstruction | None:
        """An instruction without gradients that others contain now; None if nothing is left."""
        if not self.merged:
            return one
        match one:
            case Accumulate():
                return None if one.value in self.merged else one
            case Backward():
                given = tuple(
                    tuple(name for name in names if name not in self.merged) for names in one.given
                )
                return replace(one, given=given)
            case Add():
                return replace(one, terms=tuple(n for n in one.terms if n not in self.merged))
        return one


def _made(parts: Iterable[Backward], inputs: int) -> list[str]:
    """The gradient of each input of a call, whichever part of the backward pass makes it."""
    found = [""] * inputs
    for one in parts:
        found = [name or known for name, known in zip(one.made, found, strict=True)]
    return found


def _sinks(instructions: Sequence[StepInstruction]) -> Mapping[str, Sink]:
    """The sum that each gradient is added to: those of the same sum may be one."""
    found: dict[str, Sink] = {}
    for at, one in enumerate(instructions):
        match one:
            case Accumulate():
                found[one.value] = ("total", one.total)
            case Backward():
                for i, names in enumerate(one.given):
                    found.update(dict.fromkeys(names, (at, i)))
            case Add():
                found.update(dict.fromkeys(one.terms, (at,)))
            case Forward() | Transfer() | Wait() | Free() | Update():
                pass
            case _:
                found.update((name, (at, name)) for name in reads(one))
    for at, one in enumerate(instructions):
        if isinstance(one, Transfer):
            found.update((part.value, (at, part.value)) for part in one.parts)
    return found
