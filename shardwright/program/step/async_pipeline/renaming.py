"""Gives the values, calls and handles of an instruction other names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.program.step.async_pipeline.versions import Pairs, Version
from shardwright.program.step.host_copies import HostCopy
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Backward,
    Forward,
    Free,
    Recv,
    Relayout,
    Seed,
    Send,
    StepInstruction,
    Transfer,
    Update,
    Wait,
)

Rename = Callable[[str], str]


def _as_it_is(name: str) -> str:
    return name


def renamed(one: StepInstruction, new: Rename, other: Rename = _as_it_is) -> StepInstruction:
    """An instruction whose values have the names `new`, and its call or its handle `other`."""

    def names(some: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(new(name) if name else name for name in some)

    def pairs(some: Pairs) -> Pairs:
        return tuple((new(name), new(value)) for name, value in some)

    def numbered(some: tuple[tuple[int, str], ...]) -> tuple[tuple[int, str], ...]:
        return tuple((number, new(name)) for number, name in some)

    match one:
        case Forward():
            inputs, outputs = names(one.inputs), names(one.outputs)
            return replace(one, call=other(one.call), inputs=inputs, outputs=outputs)
        case Backward():
            return replace(
                one,
                call=other(one.call),
                given=tuple(map(names, one.given)),
                made=names(one.made),
                copies=numbered(one.copies),
                totals=numbered(one.totals),
            )
        case Transfer():
            parts = (replace(p, value=new(p.value), result=new(p.result)) for p in one.parts)
            return replace(one, parts=tuple(parts), handle=other(one.handle))
        case Send() | Recv():
            payload = tuple(replace(part, value=new(part.value)) for part in one.payload)
            return replace(one, payload=payload, handle=other(one.handle))
        case HostCopy():
            value, result = new(one.value), new(one.result)
            return replace(one, value=value, result=result, handle=other(one.handle))
        case Wait():
            return Wait(other(one.handle), names(one.results))
        case Relayout():
            return replace(one, value=new(one.value), result=new(one.result))
        case Add():
            return Add(new(one.result), names(one.terms))
        case Accumulate():
            return Accumulate(new(one.total), new(one.value))
        case Free():
            return Free(names(one.names))
        case Seed():
            return Seed(names(one.results), numbered(one.gradients))
        case Version() | Update():
            return replace(one, parameters=pairs(one.parameters))
