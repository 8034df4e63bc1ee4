"""Returns outputs at the end of the step, unless something reads them earlier.

The loss is then reduced in a bucket of gradients, without a collective of its own.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.redistribution import Collective
from shardwright.program.step.instructions import Seed, StepInstruction, Transfer, Wait, reads
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram


def late_results(program: StepProgram) -> StepProgram:
    """`program` whose outputs are returned at its end, not before its backward part."""
    updates = {value for _, value in program.updates}
    program = replace(
        program,
        instructions=tuple(
            replace(one, results=tuple(name for name in one.results if name in updates))
            if isinstance(one, Seed)
            else one
            for one in program.instructions
        ),
    )
    joined = _joined(program)
    alone = {one.handle for ones in joined.values() for one in ones}
    found: list[StepInstruction] = []
    for one in program.instructions:
        if isinstance(one, Transfer | Wait) and one.handle in alone:
            continue
        if isinstance(one, Transfer) and one.handle in joined:
            parts = tuple(part for other in joined[one.handle] for part in other.parts)
            one = replace(one, parts=(*one.parts, *parts))
        elif isinstance(one, Wait) and one.handle in joined:
            names = (part.result for other in joined[one.handle] for part in other.parts)
            one = replace(one, results=(*one.results, *names))
        found.append(one)
    return replace(program, instructions=tuple(found))


def _joined(program: StepProgram) -> dict[str, list[Transfer]]:
    """Sums of gradients that take sums of returned numbers along, by handle, and those sums.

    A gradient that is alone is summed where it is, with no room for others.
    """
    known = purposes(program)
    read = {name for one in program.instructions for name in reads(one)}
    behind = False
    waiting: list[Transfer] = []
    found: dict[str, list[Transfer]] = {}
    for one in program.instructions:
        behind = behind or isinstance(one, Seed)
        if not isinstance(one, Transfer) or one.collective is not Collective.ALL_REDUCE:
            continue
        if not behind:
            numbers = all(part.shape == () and part.result not in read for part in one.parts)
            if known[one.handle] is Purpose.RESULT and numbers:
                waiting.append(one)
        elif known[one.handle] is Purpose.GRADIENT and len(one.parts) > 1:
            fits = [
                other
                for other in waiting
                if (other.channel, other.parts[0].dtype) == (one.channel, one.parts[0].dtype)
            ]
            if fits:
                found[one.handle] = fits
                waiting = [other for other in waiting if other not in fits]
    return found
