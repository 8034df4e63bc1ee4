"""Checks that the step programs of all ranks fit together.

Ranks of a group must start the same collectives in the same order, every send must have a matching
receive, and waits of different ranks must not form a cycle. As in NCCL, operations of one
communicator run in the order in which they are started, and a message is sent when its receiver is
ready. Collectives also end if a device runs one at a time in the order in which it started them,
over all communicators, as NCCL asks of those that run at once. Gloo, which matches messages by tags
and collectives by order, also runs all such programs.
Those of an asynchronous pipeline are called until each has run some calls of its steady state.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.ir.graph import VerifyError
from shardwright.program.step.async_pipeline.call_sequence import in_sequence
from shardwright.program.step.channels import axis_of, members
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Forward,
    Recv,
    Send,
    StepInstruction,
    Transfer,
    Wait,
)
from shardwright.program.step.step_program import StepProgram

Group = tuple[str, tuple[int, ...]]  # the channel, and the coordinates along all other axes
_STEADY_CALLS = 3  # of the first group, which has the fewest


def check_order(programs: Sequence[StepProgram]) -> None:
    """Raise `VerifyError` where the programs, one for each rank in order, do not fit together."""
    carried = [one.carried for one in programs if one.carried is not None]
    if carried:
        count = max(one.lag for one in carried) + _STEADY_CALLS
        programs = [in_sequence(one, count) for one in programs]
    try:
        _play(programs, one_by_one=True)
    except VerifyError:
        _play(programs, one_by_one=False)  # which says what is wrong in any order
        raise


def _play(programs: Sequence[StepProgram], *, one_by_one: bool) -> None:
    """Run the programs of all ranks until they end; raise `VerifyError` if they do not.

    With `one_by_one` a rank's collectives end in the order in which it started them, over all
    communicators.
    """
    ranks = [_Rank(program) for program in programs]
    queues: defaultdict[Group, list[deque[_Started]]] = defaultdict(list)
    for channel in _channels(programs):
        for rank in ranks:
            if rank.is_member(channel):
                queue = rank.queues[channel] = deque[_Started]()
                queues[rank.group(channel)].append(queue)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= rank.advance()
        for group, found in queues.items():
            while all(found) and found and _fit(group[0], [queue[0] for queue in found]):
                if one_by_one and not all(queue[0].is_next for queue in found):
                    break
                moved = True
                for queue in found:
                    queue.popleft().done = True
    for number, rank in enumerate(ranks):
        if one_by_one and any(not one.done for one in rank.order):
            raise VerifyError(
                f"rank {number} starts collectives of several communicators in another order than"
                f" others: {next(one.text for one in rank.order if not one.done)}"
            )
        if not rank.ended:
            raise VerifyError(f"rank {number} waits forever at: {rank.now}")
        left = [queue[0].text for queue in rank.queues.values() if queue]
        if left:
            raise VerifyError(f"rank {number} starts what no other rank does: {left[0]}")


def _channels(programs: Sequence[StepProgram]) -> list[str]:
    """All axes of the mesh, and the other channels that a program uses."""
    found = dict.fromkeys(name for program in programs for name in program.mesh.names)
    for program in programs:
        found.update((one.channel, None) for one in (*program.transfers(), *program.messages()))
    return list(found)


@dataclass(eq=False)
class _Started:
    """A collective that one rank has started, or a message; done when all have."""

    form: tuple[object, ...]
    text: str
    word: str = ""  # of a message: whether it is sent or received
    done: bool = False
    # What its rank has started on all communicators, but messages and the first that are done.
    rank_order: deque[_Started] = field(default_factory=deque)

    @property
    def is_next(self) -> bool:
        """Whether it is a message, or its rank has no earlier collective that is not done."""
        while self.rank_order and self.rank_order[0].done:
            self.rank_order.popleft()
        return bool(self.word) or self.rank_order[0] is self


def _fit(channel: str, first: Sequence[_Started]) -> bool:
    """Whether the first operations of all members can run: a sender needs a receiver.

    Raises `VerifyError` for those that never can.
    """
    if len({one.form for one in first}) > 1:
        texts = " and ".join(sorted({one.text for one in first})[:2])
        raise VerifyError(f"ranks along {channel} do not start the same: {texts}")
    if not first[0].word:
        return True
    if len(first) != 2:
        raise VerifyError(f"{first[0].text}: a message is between two ranks, not {len(first)}")
    return first[0].word != first[1].word


@dataclass
class _Rank:
    """A rank while its program is run."""

    program: StepProgram
    at: int = 0
    queues: dict[str, deque[_Started]] = field(default_factory=dict)
    in_flight: dict[str, _Started] = field(default_factory=dict)
    inside: list[_Started] = field(default_factory=list)  # of the operator that runs
    order: deque[_Started] = field(default_factory=deque)  # collectives, as in `_Started`

    @property
    def ended(self) -> bool:
        return self.at == len(self.program.instructions)

    @property
    def now(self) -> StepInstruction:
        return self.program.instructions[self.at]

    def is_member(self, channel: str) -> bool:
        """Whether the rank is one of a channel's."""
        mesh = self.program.mesh
        at = mesh.names.index(axis_of(channel))
        return mesh.coordinate(self.program.rank)[at] in members(channel, mesh)

    def group(self, channel: str) -> Group:
        """The ranks that this one communicates with on a channel."""
        mesh = self.program.mesh
        here = mesh.coordinate(self.program.rank)
        at = mesh.names.index(axis_of(channel))
        return channel, (*here[:at], *here[at + 1 :])

    def advance(self) -> bool:
        """Run instructions up to the next wait; return whether one ran."""
        start = self.at
        while not self.ended and self.step(self.now):
            self.at += 1
        return self.at > start

    def step(self, one: StepInstruction) -> bool:
        """Run an instruction; return False if it has to wait."""
        match one:
            case Transfer():
                form = one.collective, *((part.move.whole, part.dtype) for part in one.parts)
                self.in_flight[one.handle] = self.start(one.channel, form, str(one))
            case Send() | Recv():
                sizes = "message", *((part.shape, part.dtype) for part in one.payload)
                word = "send" if isinstance(one, Send) else "receive"
                self.in_flight[one.handle] = self.start(one.channel, sizes, str(one), word)
            case HostCopy():  # no other rank takes part
                self.in_flight[one.handle] = _Started((), str(one), done=True)
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

    def start(self, channel: str, form: tuple[object, ...], text: str, word: str = "") -> _Started:
        started = _Started(form, text, word, rank_order=self.order)
        if channel not in self.queues:
            raise VerifyError(f"rank {self.program.rank} is no member of {channel}: {text}")
        self.queues[channel].append(started)
        if not word:
            self.order.append(started)
        return started
