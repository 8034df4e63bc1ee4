"""Cuts a forward program where communication is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardwright.ir.buckets import gather_buckets
from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.ir.options.mixed_precision import stored_dtypes
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import (
    CALLS,
    Compute,
    Instruction,
    Load,
    Program,
    RecomputedSegment,
    Redistribute,
    reads,
    writes,
)
from shardwright.program.lower.mixed_precision import cast_dtype
from shardwright.program.step.region import inner_axes


@dataclass(frozen=True)
class Stretch:
    """Instructions without communication between them, which become a region.

    Attributes:
        instructions: the instructions, in order.
        segment: the segment of recomputation that all of them are in; 0 for none.
        inputs: the values that they read and do not make.
        outputs: the values that they make and others read.
        dropped: inputs of which nothing is saved: copies of parameters, views of these, and what a
            recomputed segment makes again.
    """

    instructions: tuple[Instruction, ...]
    segment: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dropped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunRedistribution:
    """A redistribution that communicates, forward or backward, or whose result is dropped."""

    instruction: Redistribute
    segment: int


Item = Stretch | RunRedistribution


Rewrite = Callable[[Program, Graph], Program]


def items(
    program: Program, graph: Graph, reduced: Collection[str], rewrite: Rewrite | None = None
) -> list[Item]:
    """Split a program into stretches and redistributions, in order; `rewrite` changes stretches.

    Loads are left out. A stretch also ends before the first reader of each parameter in `reduced`,
    and of each gathered copy, which may be gathered before a recomputed segment, so that the
    parameter's gradient is complete when the backward pass of the next stretch ends, and before the
    first reader of a scalar that is summed over devices, so that ranks wait for the sum as late as
    possible.
    """
    cut = _cut(program, reduced)
    again = made_again(program)
    returned = {*program.outputs, *(value for _, value in program.updates)}
    views = views_of_copies(program, graph)
    read_later: set[str] = set(returned)
    found: list[Item] = []
    for run, segment, kept in reversed(cut):
        if isinstance(run, Redistribute):
            read_later.add(run.value)
            found.append(RunRedistribution(run, segment))
            continue
        made = [name for one in run for name in writes(one)]
        copies = {name for one in run if isinstance(one, Compute) for name in one.regathers}
        copies.update(name for name, view in views.items() if view.copy in copies)
        inside = set(made)
        inputs = dict.fromkeys(name for one in run for name in reads(one) if name not in inside)
        outputs = tuple(name for name in made if name in read_later)
        read_later.update(inputs)
        dropped = {name for name in inputs if name in copies or (kept and name in again)}
        instructions = tuple(run)
        if rewrite is not None:
            part = Program(program.mesh, program.rank, tuple(inputs), instructions, outputs, ())
            instructions = rewrite(part, graph).instructions
        found.append(Stretch(instructions, segment, tuple(inputs), outputs, frozenset(dropped)))
    return found[::-1]


def loads(program: Program) -> dict[str, Load]:
    """The loads of a program, by the name of the result."""
    return {one.result: one for one in program.instructions if isinstance(one, Load)}


def dropped_copies(program: Program) -> set[str]:
    """Copies of parameters that are freed after the forward pass and gathered again."""
    flat = (one for one, *_ in _flat(program.instructions))
    return {name for one in flat if isinstance(one, Compute) for name in one.regathers}


def fetch_starts(program: Program, graph: Graph) -> set[str]:
    """The first parameter of each bucket of those that operators read as they are stored.

    Regions end before them: else all parameters of a region would be on the device at once. Copies
    that are gathered have buckets of their own.
    """
    tiles: dict[str, Load] = {}  # by the names under which a parameter is read
    order: dict[str, int] = {}  # leaf -> bytes of its tile
    stored = stored_dtypes(graph)
    for one, *_ in _flat(program.instructions):
        if isinstance(one, Load):
            tiles[one.result] = one
        elif isinstance(one, Redistribute):
            if one.value in tiles and not one.forward:
                tiles[one.result] = tiles[one.value]
        else:
            for tile in (tiles[name] for name in reads(one) if name in tiles):
                dtype = stored.get(tile.leaf, graph.tensor[tile.leaf].dtype)
                order.setdefault(tile.leaf, prod(tile.shape) * ITEM_BYTES[dtype])
    leaves = list(order)
    return {leaves[group[0]] for group in gather_buckets([(order[one], one) for one in leaves])}


def communicates(one: Redistribute) -> bool:
    """Whether a redistribution moves data, forward or backward."""
    return any(move.collective.moves_data for move in (*one.forward, *one.backward))


def op_name(one: Instruction) -> str:
    """The graph's operator that an instruction runs; empty if none."""
    return one.op.name if isinstance(one, CALLS) else ""


class ValueType(NamedTuple):
    """The dtype of a value, and whether a gradient of it is wanted."""

    dtype: str
    trained: bool


def value_types(program: Program, graph: Graph) -> dict[str, ValueType]:
    """The types of all values of a program."""
    stored = stored_dtypes(graph)
    found: dict[str, ValueType] = {}
    for name in program.leaves:
        tensor = graph.tensor[name]
        found[name] = ValueType(stored.get(name, tensor.dtype), tensor.requires_grad)
    for one, *_ in _flat(program.instructions):
        if isinstance(one, Load):
            found[one.result] = found[one.leaf]
        elif isinstance(one, Redistribute):
            source = found[one.value]
            dtype = one.cast[0] if one.cast else source.dtype
            found[one.result] = ValueType(dtype, source.trained and one.differentiable)
        else:
            trained = any(found[name].trained for name in reads(one))
            for name in writes(one):
                known = graph.tensor.get(name)  # casts of parameters are not in the graph
                if known is None:
                    found[name] = ValueType(cast_dtype(one), trained)
                else:
                    found[name] = ValueType(known.dtype, trained and known.requires_grad)
    return found


def made_again(program: Program) -> dict[str, int]:
    """The values that recomputed segments compute again, by name, each with its segment."""
    found: dict[str, int] = {}
    for one, segment, _ in _flat(program.instructions):
        moves = not isinstance(one, Redistribute) or one.forward
        if segment and (moves or any(name in found for name in reads(one))):
            found.update(dict.fromkeys(writes(one), segment))
    return found


def _flat(instructions: Sequence[Instruction]) -> Iterator[tuple[Instruction, int, bool]]:
    """Triples of an instruction, its segment of recomputation, and whether the segment keeps it.

    The sum over devices of a kept operator's partial results is kept instead of these.
    """
    for one in instructions:
        if not isinstance(one, RecomputedSegment):
            yield one, 0, False
            continue
        terms: set[str] = set()
        for inner in one.instructions:
            kept = one.keeps(inner)
            if kept:
                terms.update(writes(inner))
            elif isinstance(inner, Redistribute) and inner.value in terms and _sums(inner):
                kept = True
            yield inner, 0 if kept else one.number, kept


def _sums(one: Redistribute) -> bool:
    """Whether a redistribution sums partial results of several devices."""
    first = next((move.collective for move in one.forward if move.collective.moves_data), None)
    return first in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


def _cut(
    program: Program, reduced: Collection[str]
) -> list[tuple[list[Instruction] | Redistribute, int, bool]]:
    """Cut a program at redistributions that communicate.

    Returns these redistributions and the runs between them in order, each with its segment of
    recomputation and whether the segment keeps it.
    """
    loaded = {name: load.leaf for name, load in loads(program).items()}
    unread = {name for name, leaf in loaded.items() if leaf in reduced}
    dropped = dropped_copies(program)
    found: list[tuple[list[Instruction] | Redistribute, int, bool]] = []
    open_run: list[Instruction] | None = None
    last = 0, False
    for one, segment, kept in _flat(program.instructions):
        if isinstance(one, Load):
            continue
        if isinstance(one, Redistribute) and (communicates(one) or one.result in dropped):
            found.append((one, segment, kept))
            unread.discard(one.value)
            if one.value in loaded or (one.after == () and one.forward):
                unread.add(one.result)
            open_run = None
            continue
        first_read = unread.intersection(reads(one))
        unread -= first_read
        alone = bool(inner_axes(one))
        if open_run is None or first_read or alone or (segment, kept) != last:
            open_run = []
            found.append((open_run, segment, kept))
        open_run.append(one)
        last = segment, kept
        if alone:
            open_run = None
    return found


class CopyView(NamedTuple):
    """A view of a copy of a parameter, and the operator that makes it."""

    copy: str
    maker: Compute


def views_of_copies(program: Program, graph: Graph) -> dict[str, CopyView]:
    """The views, by name, of copies of parameters that are dropped; also their other names."""
    copy_of = {name: name for name in dropped_copies(program)}
    found: dict[str, CopyView] = {}
    serial = {op.name: op for op in graph.ops}
    for one, *_ in _flat(program.instructions):
        if isinstance(one, Redistribute) and not one.forward and one.value in found:
            copy_of[one.result], found[one.result] = copy_of[one.value], found[one.value]
        if not isinstance(one, Compute) or one.op.name not in serial:
            continue
        given = dict(zip(serial[one.op.name].operands, one.op.operands, strict=True))
        for name in one.op.outputs:
            source = given.get(graph.tensor[name].alias_of, "")
            if source in copy_of:
                copy_of[name] = copy_of[source]
                found[name] = CopyView(copy_of[name], one)
    return found
