"""Plans the messages between pipeline groups under a schedule: sends, receives and waits.

A group posts receives of one channel in the order of the sends. It waits for a message that it sent
once a message that it received implies that the other group has posted the receive, so that this
wait adds no dependency between groups and cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwright.ir.schedules.registry import orders, schedule_named
from shardwright.ir.schedules.schedule import Kind, Pass, PipelineError


class Message(NamedTuple):
    """The message from stage `source` to `target` in micro-batch `number`.

    Values if the target is behind the source, else their gradients.
    """

    source: int
    target: int
    number: int

    @property
    def backward(self) -> bool:
        """Whether it has gradients."""
        return self.target < self.source

    def later(self, number: int) -> Message:
        """The message of the micro-batch so many later."""
        return self._replace(number=self.number + number)


@dataclass(frozen=True, slots=True)
class PassMessages:
    """One pass of a group, with its messages; between stages of one group nothing is sent.

    Attributes:
        one: the pass.
        posts: messages that the group starts to receive before it.
        received: the message, posted by then, that it waits for before the pass.
        known_sent: messages of its own that have arrived by then, and are waited for.
        sent: the message that it sends after the pass.
    """

    one: Pass
    posts: tuple[Message, ...]
    received: Message | None
    known_sent: tuple[Message, ...]
    sent: Message | None

    def later(self, number: int) -> PassMessages:
        """The pass, with its messages, of the micro-batch so many later."""
        return PassMessages(
            self.one._replace(number=self.one.number + number),
            tuple(one.later(number) for one in self.posts),
            None if self.received is None else self.received.later(number),
            tuple(one.later(number) for one in self.known_sent),
            None if self.sent is None else self.sent.later(number),
        )


@lru_cache(maxsize=16)
def steps(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[tuple[PassMessages, ...], ...]:
    """The steps of each group; raises `PipelineError` for a schedule that waits for itself."""
    played = _Play(schedule, groups, stages, micro_batches)
    while any(played.advance(group) for group in range(groups)):
        pass
    for group, order in enumerate(played.orders):
        if len(played.found[group]) < len(order):
            one = order[len(played.found[group])]
            raise PipelineError(
                f"the schedule {schedule} waits for itself: group {group} cannot start the"
                f" {one.kind.name.lower()} pass of stage {one.stage}, micro-batch {one.number}"
            )
    return tuple(map(tuple, played.found))


class _Play:
    """Plays the passes of all groups, each pass as soon as the message that it reads was sent."""

    def __init__(self, schedule: str, groups: int, stages: int, micro_batches: int) -> None:
        self.stages = stages
        self.orders = orders(schedule, groups, stages, micro_batches)
        self.homes = schedule_named(schedule).homes(groups, stages)
        self.found: list[list[PassMessages]] = [[] for _ in range(groups)]
        # How many passes of each group a group knows to have begun, and each sender knew.
        self.known = [[0] * groups for _ in range(groups)]
        self.carried: dict[Message, list[int]] = {}
        self.sent: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)  # in order
        self.posted: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.begun: dict[Message, int] = {}  # the pass before which a message was posted
        self.unknown: list[list[Message]] = [[] for _ in range(groups)]
        self.done: set[Pass] = set()

    def advance(self, group: int) -> bool:
        """Play the passes of a group that can run now; return whether there was one."""
        order, found = self.orders[group], self.found[group]
        before = len(found)
        while len(found) < len(order) and self.play(group, order[len(found)]):
            pass
        return len(found) > before

    def play(self, group: int, one: Pass) -> bool:
        """Play a pass if its message has arrived; return whether it ran."""
        at, known = len(self.found[group]) + 1, self.known[group]
        needed = self.needed(one)
        posts: tuple[Message, ...] = ()
        received = None
        if needed is not None:
            source = self.homes[needed.source]
            if source == group:
                kinds = (Kind.BACKWARD, Kind.INPUTS) if needed.backward else (Kind.FORWARD,)
                if self.done.isdisjoint(Pass(needed.source, one.number, kind) for kind in kinds):
                    return False
            elif needed not in self.carried:
                return False
            else:
                received = needed
                posts = self.post(source, group, needed, at)
                theirs = self.carried.pop(needed)
                known[:] = map(max, known, theirs)
        known[group] = at
        known_sent = self.arrived(group)
        sent = self.given(one)
        if sent is not None:
            target = self.homes[sent.target]
            if target == group:
                sent = None
            else:
                self.sent[group, target].append(sent)
                self.carried[sent] = list(known)
                self.unknown[group].append(sent)
        self.done.add(one)
        self.found[group].append(PassMessages(one, posts, received, known_sent, sent))
        return True

    def post(self, source: int, group: int, needed: Message, at: int) -> tuple[Message, ...]:
        """Messages that have to be posted so that `needed` is, in the order of the sender."""
        link = source, group
        first = self.posted[link]
        last = self.sent[link].index(needed) + 1
        self.posted[link] = max(first, last)
        posts = tuple(self.sent[link][first:last])
        self.begun.update(dict.fromkeys(posts, at))
        return posts

    def arrived(self, group: int) -> tuple[Message, ...]:
        """Messages of a group whose receives it now knows to be posted."""
        found = [
            one
            for one in self.unknown[group]
            if self.begun.get(one, 1 << 62) <= self.known[group][self.homes[one.target]]
        ]
        self.unknown[group] = [one for one in self.unknown[group] if one not in found]
        return tuple(found)

    def needed(self, one: Pass) -> Message | None:
        """The message from another stage that a pass reads."""
        if one.kind is Kind.WEIGHTS:
            return None
        source = one.stage + (-1 if one.kind is Kind.FORWARD else 1)
        return Message(source, one.stage, one.number) if 0 <= source < self.stages else None

    def given(self, one: Pass) -> Message | None:
        """The message to another stage that a pass makes."""
        if one.kind is Kind.WEIGHTS:
            return None
        target = one.stage + (1 if one.kind is Kind.FORWARD else -1)
        return Message(one.stage, target, one.number) if 0 <= target < self.stages else None
