"""States of random generators while calls are recorded and not executed.

After a recorded draw its generator gets a marker for a state, by which the next draw knows what it
follows: a state that the user saved and restored is followed, and so is a new seed. What a state
really is is computed when it is needed, by drawing the same numbers into memory that is freed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from shardwright.runtime.deferred.steps import Step

_FIRST_MARKER = 0x5DEECE66D << 20  # markers are seeds from here on; any others would do


@dataclass(frozen=True)
class After:
    """The state after a recorded step."""

    step: int


State = torch.Tensor | After


@final
class RandomStates:
    """States before and after recorded draws; `draw` executes a step for its effect on them."""

    def __init__(self, draw: Callable[[Step], None]) -> None:
        self.draw = draw
        self.steps: dict[int, Step] = {}
        self.markers: dict[bytes, After] = {}
        self.known: dict[int, torch.Tensor] = {}  # step -> the state after it
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.last: list[tuple[torch.Generator, State]] = []

    def now(self, generator: torch.Generator) -> State:
        """The state of `generator`, which may be a marker."""
        state = generator.get_state()
        return self.markers.get(_digest(state), state)

    def mark(self, generator: torch.Generator, step: Step) -> None:
        """Note that `step`, which has been recorded, has drawn from `generator`."""
        self.steps[step.number] = step
        self.generators.setdefault(id(generator), (generator, generator.get_state()))
        generator.manual_seed(_FIRST_MARKER + step.number)
        self.markers[_digest(generator.get_state())] = After(step.number)

    def restore(self, generator: torch.Generator) -> None:
        """Give `generator` the state that its marker stands for."""
        generator.set_state(self.resolved(self.now(generator)))

    def pause(self) -> None:
        """Give generators that have markers their first states, until `finish`."""
        for generator, first in self.generators.values():
            self.last.append((generator, self.now(generator)))
            generator.set_state(first)

    def finish(self) -> None:
        """Leave generators as the recorded calls would have left them."""
        for generator, state in self.last:
            generator.set_state(self.resolved(state))
        self.last.clear()

    def resolved(self, state: State) -> torch.Tensor:
        """The state itself."""
        ahead: list[int] = []
        earlier = state
        while isinstance(earlier, After) and earlier.step not in self.known:
            ahead.append(earlier.step)
            earlier = self.steps[earlier.step].before
        for number in reversed(ahead):
            step = self.steps[number]
            generator = torch.default_generator
            saved = generator.get_state()
            generator.set_state(self.resolved(step.before))
            self.draw(step)
            self.known[number] = generator.get_state()
            generator.set_state(saved)
        return self.known[state.step] if isinstance(state, After) else state


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
