"""Checks that the step programs of all ranks fit together.

Ranks of a group must start the same collectives in the same order, and no rank may wait for one
that others only start behind a wait of their own. Collectives of one communicator run in the order
in which they were started, as NCCL has it; what runs with NCCL runs with Gloo.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.ir.graph import VerifyError
from shardwright.program.step.instructions import (
    Forward,
    StepInstruction,
    StepProgram,
    Transfer,
    Wait,
)

Group = tuple[str, tuple[int, ...]]  # the axis, and the coordinates along all others


def check_order(programs: Sequence[StepProgram]) -> None:
    """Raise `VerifyError` where the programs, one for each rank in order, do not fit together."""
    ranks = [_Rank(program) for program in programs]
    queues: defaultdict[Group, list[deque[_Started]]] = defaultdict(list)
    for rank in ranks:
        for axis in rank.program.mesh.names:
            queue: deque[_Started] = deque()
            rank.queues[axis] = queue
            queues[rank.group(axis)].append(queue)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= rank.advance()
        for group, members in queues.items():
            while all(members) and members:
                first = [queue.popleft() for queue in members]
                moved = True
                if len({one.form for one in first}) > 1:
                    texts = " and ".join(sorted({one.text for one in first})[:2])
                    raise VerifyError(f"ranks along {group[0]} do not start the same: {texts}")
                for one in first:
                    one.done = True
    for number, rank in enumerate(ranks):
        if not rank.ended:
            raise VerifyError(f"rank {number} waits forever at: {rank.now}")
        left = [queue[0].text for queue in rank.queues.values() if queue]
        if left:
            raise VerifyError(f"rank {number} starts what no other rank does: {left[0]}")


@dataclass(eq=False)
class _Started:
    """A collective that one rank has started; done when all have."""

    form: tuple[object, ...]
    text: str
    done: bool = False


@dataclass
class _Rank:
    """A rank while its program is run."""

    program: StepProgram
    at: int = 0
    queues: dict[str, deque[_Started]] = field(default_factory=dict)
    in_flight: dict[str, _Started] = field(default_factory=dict)
    inside: list[_Started] = field(default_factory=list)  # of the operator that runs

    @property
    def ended(self) -> bool:
        return self.at == len(self.program.instructions)

    @property
    def now(self) -> StepInstruction:
        return self.program.instructions[self.at]

    def group(self, axis: str) -> Group:
        """The ranks that this one communicates with along an axis."""
        mesh = self.program.mesh
        place = mesh.coordinate(self.program.rank)
        at = mesh.names.index(axis)
        return axis, (*place[:at], *place[at + 1 :])

    def advance(self) -> bool:
        """Run until something is waited for; whether anything was run."""
        start = self.at
        while not self.ended and self.step(self.now):
            self.at += 1
        return self.at > start

    def step(self, one: StepInstruction) -> bool:
        """Run an instruction; False if it waits."""
        match one:
            case Transfer():
                form = one.collective, *((part.move.whole, part.dtype) for part in one.parts)
                self.in_flight[one.handle] = self.start(one.channel, form, str(one))
            case Wait():
                if one.handle not in self.in_flight:
                    raise VerifyError(f"rank {self.program.rank} waits for {one.handle} too early")
                return self.in_flight[one.handle].done
            case Forward() if axes := self.program.regions[one.region].communicates:
                if not self.inside:
                    inside = "inside", len(self.program.regions[one.region].inputs)
                    self.inside = [self.start(axis, inside, str(one)) for axis in axes]
                if not all(each.done for each in self.inside):
                    return False
                self.inside = []
        return True

    def start(self, axis: str, form: tuple[object, ...], text: str) -> _Started:
        started = _Started(form, text)
        self.queues[axis].append(started)
        return started
