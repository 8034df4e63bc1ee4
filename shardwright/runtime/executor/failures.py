"""Handles steps that failed midway: collects transfers in flight and checks that ranks agree.

A rank that started the next step could join collectives of the failed step, in which other ranks
may still be. So a module that communicates is unusable after an error in a step until all ranks
have agreed: then the transfers that they have started match and can be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from textwrap import shorten

import torch.distributed as dist

from shardwright.ir.graph import VerifyError
from shardwright.program.step.instructions import Forward, Recv, Send, Transfer, Wait
from shardwright.program.step.order import check_order
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.executor.transfers import InFlight

_NOWHERE = "nowhere"


class StepFailedError(RuntimeError):
    """A step failed in the middle, and the ranks have not agreed on where."""


@dataclass(frozen=True)
class Failure:
    """A run that ended before its time.

    Attributes:
        program: what it ran.
        position: the instruction at which it ended.
        in_flight: the transfers that it had started, by handle.
        error: the error, in one line.
        time: the host's clock then, in seconds, which hosts keep equal to less than a wait.
    """

    program: StepProgram
    position: int
    in_flight: Mapping[str, InFlight]
    error: str
    time: float = field(default_factory=time.time)

    @property
    def text(self) -> str:
        """The instruction and the error, in one line."""
        return f"at {self.program.instructions[self.position]}: {self.error}"

    @property
    def short_text(self) -> str:
        """The instruction and the error in one line, of long ones only the beginning."""
        one = str(self.program.instructions[self.position])
        return f"at {shorten(one, 70, placeholder=' ...')}: {self.error[:200]}"

    @property
    def is_known(self) -> bool:
        """Whether it is known which transfers were started; not if a transfer itself failed."""
        one = self.program.instructions[self.position]
        if isinstance(one, Forward):
            return not self.program.regions[one.region].communicates
        return not isinstance(one, Transfer | Send | Recv | Wait)

    def drained(self) -> StepProgram:
        """The part of the program that was run, and then a wait for each transfer in flight."""
        waits = (Wait(handle, ()) for handle in self.in_flight)
        return replace(
            self.program, instructions=(*self.program.instructions[: self.position], *waits)
        )


def refuse_after(failure: Failure | None) -> None:
    """Raise `StepFailedError` after a failure."""
    if failure is not None:
        raise StepFailedError(
            f"a step failed {failure.text}; other ranks may be elsewhere in it, so nothing more"
            " runs: call recover() on every rank, or start again from a checkpoint"
        )


def agree(failure: Failure | None) -> None:
    """Wait for all transfers in flight on all ranks; each rank passes its failure.

    Raises `StepFailedError` on every rank if such a wait could last forever; the rank that
    failed first is named before the others, with its error. This is a collective in a process group
    of its own, because transfers may be in flight in those of the step.
    """
    group = dist.new_group(backend="gloo")
    every: list[tuple[StepProgram | None, float, str]] = [(None, inf, "")] * dist.get_world_size()
    mine = failure.drained() if failure is not None and failure.is_known else None
    known = (inf, _NOWHERE) if failure is None else (failure.time, failure.short_text)
    dist.all_gather_object(every, (mine, *known), group=group)
    dist.destroy_process_group(group)
    if all(time == inf for _, time, _ in every):
        return
    programs = [program for program, _, _ in every if program is not None]
    try:
        if len(programs) < len(every):
            raise VerifyError("not every rank knows what it has sent")
        check_order(programs)
    except VerifyError as e:
        # The first one is the cause: others wait for that rank.
        order = sorted(range(len(every)), key=lambda rank: every[rank][1])
        places = "; ".join(f"rank {rank} {every[rank][2]}" for rank in order)
        raise StepFailedError(
            f"the ranks failed in different places ({e}), {places}: start again from a checkpoint"
        ) from e
    assert failure is not None, "all ranks have one"
    for transfer in failure.in_flight.values():
        transfer.results()
