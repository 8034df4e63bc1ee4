"""A step program as one call of a module plays it: up to its results, then group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch.distributed as dist

from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Seed,
    Transfer,
    reads,
    writes,
)
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.executor.direct import DirectStep
from shardwright.runtime.executor.executor import StepExecutor
from shardwright.runtime.regions.connected_passes import ConnectedExecutor
from shardwright.runtime.regions.regions import Regions


@dataclass(frozen=True)
class CallProgram:
    """A step program with its executor, and where its backward part begins and gradients end.

    Attributes:
        executor: runs the program.
        seed: the position of its `Seed`, where the backward part begins.
        seeds: the gradients that enter there, as in `Seed`.
        groups: gradients that become final together, as (leaf, gradient) pairs, each group with
            the position behind the instruction that makes the last of them.
        numbers: for each group the indices of its leaves.
        read_later: arguments and results that the backward part reads.
        direct: runs the same step by autograd alone, if it has no communication.
    """

    executor: StepExecutor
    seed: int
    seeds: tuple[tuple[int, str], ...]
    groups: tuple[tuple[tuple[tuple[str, str], ...], int], ...]
    numbers: tuple[tuple[int, ...], ...]
    read_later: frozenset[str]
    direct: DirectStep | None = None

    @staticmethod
    def of(
        program: StepProgram,
        regions: Regions,
        channels: Mapping[str, dist.ProcessGroup],
        names: Sequence[str],
    ) -> CallProgram:
        """Facts of a program and its executor; leaves are numbered as in `names`."""
        instructions = program.instructions
        seed = next(
            (i for i, one in enumerate(instructions) if isinstance(one, Seed)), len(instructions)
        )
        there = {*program.given, *(n for one in instructions[:seed] for n in writes(one))}
        later = {name for one in instructions[seed + 1 :] for name in reads(one)}
        later &= {*program.leaves, *(v for _, _, v in program.inputs), *program.outputs}
        begin = instructions[seed] if seed < len(instructions) else None
        seeds = begin.gradients if isinstance(begin, Seed) else ()
        groups, number = tuple(_groups(program)), {name: i for i, name in enumerate(names)}
        numbers = tuple(tuple(number[leaf] for leaf, _ in group) for group, _ in groups)
        executor = ConnectedExecutor(program, regions, channels, {end for _, end in groups})
        return CallProgram(executor, seed, seeds, groups, numbers, frozenset(later & there))


def _groups(program: StepProgram) -> Iterator[tuple[tuple[tuple[str, str], ...], int]]:
    """Gradients that become final without anything computed or sent between, in this order."""
    last = {name: at for at, one in enumerate(program.instructions) for name in writes(one)}
    busy = (isinstance(one, Forward | Backward | Transfer) for one in program.instructions)
    before = list(accumulate(map(int, busy)))
    together: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for leaf, gradient in program.gradients:
        together[before[last[gradient]]].append((leaf, gradient))
    for count in sorted(together):
        yield tuple(together[count]), 1 + max(last[value] for _, value in together[count])
