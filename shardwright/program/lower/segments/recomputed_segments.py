"""Groups the instructions of a recomputed segment."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwright.program.instructions import (
    CALLS,
    Instruction,
    RecomputedSegment,
    reads,
    writes,
)
from shardwright.program.lower.segments.kept_order import in_few_runs


def grouped_segments(
    instructions: Sequence[Instruction],
    segments: Sequence[int],
    returned: Collection[str],
    kept: frozenset[str] = frozenset(),
    views: Collection[str] = (),
) -> tuple[Instruction, ...]:
    """`instructions` with those of each segment grouped into a `RecomputedSegment`; 0 is none.

    Operators that are `kept` run once, although they are inside of a segment, which is ordered so
    that these are few runs; of `views` see `in_few_runs`.

    Other instructions between those of a segment are moved before it, or after it if they depend
    on it. No instruction of the segment may depend on the latter.
    """
    last = {name: i for i, one in enumerate(instructions) for name in reads(one)}
    last.update((name, len(instructions)) for name in returned)
    found: list[Instruction] = []
    done: set[int] = set()
    for i, segment in enumerate(segments):
        if i in done:
            continue
        if not segment:
            found.append(instructions[i])
            continue
        members = [j for j in range(i, len(segments)) if segments[j] == segment]
        made = [name for j in members for name in writes(instructions[j])]
        tainted, behind = set(made), []
        for j in range(i, members[-1]):
            if segments[j] == segment:
                continue
            if tainted.isdisjoint(reads(instructions[j])):
                found.append(instructions[j])
            else:
                tainted.update(writes(instructions[j]))
                behind.append(instructions[j])
        inside = tuple(instructions[j] for j in members)
        needed = {name for one in behind for name in reads(one)}
        gives = tuple(name for name in made if last.get(name, -1) > members[-1] or name in needed)
        takes = dict.fromkeys(name for one in inside for name in reads(one))
        once = kept
        if any(isinstance(one, CALLS) and one.op.name in kept for one in inside):
            inside, once = in_few_runs(inside, kept, views)
        found.append(
            RecomputedSegment(
                segment, inside, tuple(name for name in takes if name not in made), gives, once
            )
        )
        found += behind
        done.update(range(i, members[-1] + 1))
    return tuple(found)
