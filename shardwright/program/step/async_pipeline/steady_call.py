"""Makes the two passes of a mini-batch one call of an asynchronous pipeline's steady state.

A call runs the forward pass of its mini-batch and the backward pass of the one that came `lag`
calls before, and updates the weights. Names end in the age of their mini-batch in calls: `x@0` is
of the mini-batch that comes with the call, `x@2` of that of two calls before. While the pipeline
fills, calls end at the `Seed`, and while it drains they begin behind it.

The forward pass reads the weights, or versions of them. Where both passes read the same version, it
is carried with the mini-batch if the backward pass reads it again; else the backward pass reads the
weights, or versions of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardwright.ir.schedules.weight_versions import Weights, lag
from shardwright.program.step.async_pipeline.lowering import GRADIENTS_OUT
from shardwright.program.step.async_pipeline.renaming import renamed
from shardwright.program.step.async_pipeline.versions import Carried, Pairs, Version
from shardwright.program.step.instructions import (
    Forward,
    Recv,
    Seed,
    Send,
    StepInstruction,
    Transfer,
    Update,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.passes.free import free
from shardwright.program.step.step_program import StepProgram
from shardwright.program.step.verify import verify

Part = list[StepInstruction]


def steady_call(passes: StepProgram, weights: Weights, stage: int, stages: int) -> StepProgram:
    """The program of a call, given that of both passes; raises `VerifyError` if it cannot run."""
    ahead, behind = _halves(passes)
    trained = {leaf for leaf, _ in passes.gradients}
    horizon, late = weights.horizon(stage, stages), lag(stage, stages)
    if weights.stashes and late:
        ahead = _with_versions(ahead, _named(trained, ""), 0, "")
    elif horizon.forward:
        ahead = _with_versions(ahead, _named(trained, ""), horizon.forward, weights.method)
    if not weights.keeps(stage, stages):
        if horizon.backward:
            again = _named(trained, "~")
            behind = _with_versions(behind, again, horizon.backward, weights.method)
    elif any(isinstance(one, Version) for one in ahead):
        behind = [_reading_versions(one, _named(trained, "")) for one in behind]
    found = free(_called(passes, ahead, behind, late))
    verify(found)
    return found


def aged(name: str, age: int) -> str:
    """The name of a value, a call or a handle of the mini-batch of `age` calls before."""
    return f"{name}@{age}"


def _halves(passes: StepProgram) -> tuple[Part, Part]:
    """The forward pass up to the seed, and the rest."""
    instructions = list(passes.instructions)
    at = next(i for i, one in enumerate(instructions) if isinstance(one, Seed)) + 1
    return instructions[:at], instructions[at:]


def _named(trained: Iterable[str], end: str) -> Mapping[str, str]:
    """The name of the version of each weight, which ends in `end`."""
    return {leaf: f"{leaf}/version{end}" for leaf in trained}


def _with_versions(part: Part, versions: Mapping[str, str], updates: int, method: str) -> Part:
    """A pass that reads `versions` of weights, each made right before its reader."""
    made: set[str] = set()
    found: Part = []
    for one in part:
        if not isinstance(one, Update):
            read = [name for name in dict.fromkeys(reads(one)) if name in versions]
            new = tuple((name, versions[name]) for name in read if name not in made)
            made.update(read)
            if new:
                found.append(Version(new, updates, method))
        found.append(_reading_versions(one, versions))
    return found


def _reading_versions(one: StepInstruction, versions: Mapping[str, str]) -> StepInstruction:
    """An instruction that reads `versions` of weights."""
    if isinstance(one, Update):
        return one
    return renamed(one, lambda name: versions.get(name, name))


def _called(passes: StepProgram, ahead: Part, behind: Part, late: int) -> StepProgram:
    """The program of a call whose backward pass is `late` calls behind, before `free`."""
    leaves = set(passes.leaves)

    def of_age(one: StepInstruction, age: int) -> StepInstruction:
        return renamed(
            one,
            lambda name: name if name in leaves else aged(name, age),
            lambda name: aged(name, age),
        )

    instructions = [of_age(one, 0) for one in ahead]
    for one in behind:
        if isinstance(one, Wait) and one.handle == GRADIENTS_OUT:
            continue  # in the next call, when the stage before has begun to receive
        if isinstance(one, Send) and one.handle == GRADIENTS_OUT:
            instructions.append(Wait(aged(GRADIENTS_OUT, late + 1), ()))
        new = of_age(one, late)
        instructions.append(replace(new, late=late) if isinstance(new, Update) else new)
    return replace(
        passes,
        instructions=tuple(instructions),
        inputs=tuple((leaf, n, aged(value, 0)) for leaf, n, value in passes.inputs),
        seeds=tuple((aged(value, 0), aged(seed, late)) for value, seed in passes.seeds),
        outputs=tuple(aged(name, late) for name in passes.outputs),
        gradients=tuple((leaf, aged(value, late)) for leaf, value in passes.gradients),
        updates=tuple((buffer, aged(value, 0)) for buffer, value in passes.updates),
        carried=_carried(passes, ahead, behind, late),
    )


def _carried(passes: StepProgram, ahead: Part, behind: Part, late: int) -> Carried:
    """The names that the backward pass reads of the forward pass of `late` calls before."""
    made = {value for _, _, value in passes.inputs}
    made.update(name for one in ahead for name in writes(one))
    wanted = dict.fromkeys(name for one in behind for name in reads(one))
    wanted.update(dict.fromkeys((*passes.outputs, *(value for _, value in passes.gradients))))
    values = [name for name in wanted if name in made]
    calls = [one.call for one in ahead if isinstance(one, Forward) and one.saves]
    started = {one.handle for one in ahead if isinstance(one, Transfer | Send | Recv)}
    ended = {one.handle for one in ahead if isinstance(one, Wait)}
    handles = _in_turn(sorted(started - ended), late)
    if any(isinstance(one, Send) and one.handle == GRADIENTS_OUT for one in behind):
        handles += ((aged(GRADIENTS_OUT, late), aged(GRADIENTS_OUT, late + 1)),)
    return Carried(late, _in_turn(values, late), _in_turn(calls, late), handles)


def _in_turn(names: Sequence[str], late: int) -> Pairs:
    """Each name of every age with the next age, up to that at which it is read."""
    return tuple((aged(name, age), aged(name, age + 1)) for name in names for age in range(late))
