"""Handles steps that failed midway: collects transfers in flight and checks that ranks agree.

A rank that started the next step could join collectives of the failed step, in which other ranks
may still be. So a module that communicates is unusable after an error in a step until all ranks
have agreed: then the transfers that they have started match and can be waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    """A run that ended at the instruction `position`, and transfers that it had started."""

    program: StepProgram
    position: int
    in_flight: Mapping[str, InFlight]
    error: str

    @property
    def text(self) -> str:
        """The instruction and the error, in one line."""
        return f"at {self.program.instructions[self.position]}: {self.error}"

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

    Raises `StepFailedError` on every rank if such a wait could last forever. This is a collective
    in a process group of its own, because transfers may be in flight in those of the step.
    """
    group = dist.new_group(backend="gloo")
    every: list[tuple[StepProgram | None, str]] = [(None, "")] * dist.get_world_size()
    mine = failure.drained() if failure is not None and failure.is_known else None
    text = failure.text if failure is not None else _NOWHERE
    dist.all_gather_object(every, (mine, text), group=group)
    dist.destroy_process_group(group)
    if all(place == _NOWHERE for _, place in every):
        return
    programs = [program for program, _ in every if program is not None]
    try:
        if len(programs) < len(every):
            raise VerifyError("not every rank knows what it has sent")
        check_order(programs)
    except VerifyError as e:
        places = "; ".join(f"rank {rank} {place[:120]}" for rank, (_, place) in enumerate(every))
        raise StepFailedError(
            f"the ranks failed in different places ({e}), {places}: start again from a checkpoint"
        ) from e
    assert failure is not None, "all ranks have one"
    for transfer in failure.in_flight.values():
        transfer.results()
