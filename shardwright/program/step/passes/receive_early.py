"""Starts to receive a message as soon as the one before it has arrived.

Its sender then need not wait until the receiver reaches the pass that reads it. One message is
received ahead, which costs one more buffer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shardwright.program.step.instructions import Recv, StepInstruction, Wait
from shardwright.program.step.step_program import StepProgram


def receive_early(program: StepProgram) -> StepProgram:
    """`program` with the next message's `Recv` after the wait for each; their order stays."""
    left = deque(one for one in program.instructions if isinstance(one, Recv))
    received = {one.handle for one in left}
    started: set[str] = set()
    found: list[StepInstruction] = []

    def start() -> None:
        started.add(left[0].handle)
        found.append(left.popleft())

    for one in program.instructions:
        if isinstance(one, Recv):
            if one.handle not in started:
                start()
            continue
        found.append(one)
        if isinstance(one, Wait) and one.handle in received and left:
            start()
    return replace(program, instructions=tuple(found))
