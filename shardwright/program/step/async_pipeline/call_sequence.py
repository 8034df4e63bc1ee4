"""Writes out the calls of an asynchronous pipeline one after the other, from empty to empty."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from shardwright.program.step.async_pipeline.renaming import renamed
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import Recv, Seed, Send, StepInstruction, Transfer, Wait
from shardwright.program.step.step_program import StepProgram


def in_sequence(program: StepProgram, mini_batches: int) -> StepProgram:
    """The calls of `program` that train `mini_batches`: the fill, the steady state and the drain.

    Names end in the number of their mini-batch instead of its age.
    """
    assert program.carried is not None, "a program of an asynchronous pipeline"
    late, leaves = program.carried.lag, set(program.leaves)
    at = next(i for i, one in enumerate(program.instructions) if isinstance(one, Seed)) + 1
    ahead, behind = program.instructions[:at], program.instructions[at:]
    found: list[StepInstruction] = []
    for call in range(mini_batches + late):
        played = (
            *(ahead if call < mini_batches else ()),
            *(behind if late <= call else ()),
        )

        def new(name: str, call: int = call) -> str:
            if name in leaves:
                return name
            value, _, age = name.rpartition("@")
            return f"{value}@{call - int(age)}"

        found += [renamed(one, new, new) for one in played]
    pairs = partial(_numbered, mini_batches=mini_batches)
    inputs = ((leaf, n, name) for leaf, _, value in program.inputs for n, name in pairs(value))
    return replace(
        program,
        instructions=tuple(_waiting_for_what_started(found)),
        inputs=tuple(inputs),
        seeds=tuple(
            (value, seed)
            for given, gradient in program.seeds
            for (_, value), (_, seed) in zip(pairs(given), pairs(gradient), strict=True)
        ),
        outputs=tuple(name for value in program.outputs for _, name in pairs(value)),
        gradients=tuple((x, name) for x, value in program.gradients for _, name in pairs(value)),
        updates=tuple((x, name) for x, value in program.updates for _, name in pairs(value)),
        carried=None,
    )


def _numbered(name: str, mini_batches: int) -> Iterator[tuple[int, str]]:
    """A value of every mini-batch, with the number of the mini-batch."""
    value, _, _ = name.rpartition("@")
    return ((number, f"{value}@{number}") for number in range(mini_batches))


def _waiting_for_what_started(instructions: list[StepInstruction]) -> Iterator[StepInstruction]:
    """The instructions without waits of the first calls for calls before them, and with the last.

    What the last calls send, nothing waits for but the end.
    """
    started: dict[str, None] = {}
    for one in instructions:
        if isinstance(one, Transfer | Send | Recv | HostCopy):
            started[one.handle] = None
        elif isinstance(one, Wait):
            if one.handle not in started:
                continue
            del started[one.handle]
        yield one
    for handle in started:
        yield Wait(handle, ())
