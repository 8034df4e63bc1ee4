"""Copies of parameters that an operator drops and its backward pass makes again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shardwright.program.instructions import Redistribute
from shardwright.simulate.memory.allocator import Block
from shardwright.simulate.memory.tape import GatheredBucket, Tape
from shardwright.simulate.memory.values import View


@final
class Dropped:
    """Those of one operator, one by one or together with others of their flight."""

    def __init__(self, walk: Tape, regathers: Sequence[str]) -> None:
        self._walk = walk
        self._given_again = walk.given_again
        self._names = {id(walk.views[n].block): n for n in regathers if n in walk.views}
        self._alone: list[tuple[Redistribute, View]] = []
        self._flown: list[tuple[GatheredBucket, int]] = []

    def takes(self, block: Block) -> bool:
        """Whether `block`, which the operator would keep, is such a copy; then it is noted."""
        name = self._names.get(id(block))
        if name is None:
            return id(block) in self._given_again
        if name in self._walk.flown:
            self._flown.append(self._walk.flown[name])
        else:
            self._alone.append(self._walk.source[name])
        return True

    def wanted(self) -> None:
        """There will be a backward pass."""
        for flight, place in self._flown:
            flight.users[place] += 1

    def again(self) -> list[View]:
        """The copies, made again, each with an owner."""
        made = [self._walk.brought(how, source) for how, source in self._alone]
        return [*made, *(flight.again(place) for flight, place in self._flown)]
