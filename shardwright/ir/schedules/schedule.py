"""`Schedule`: all that is known of one pipeline schedule.

A new one is a value of this class in a file of its own, and its line in `registry.py`. Prices,
memory, checks of plans, the timeline and the step program ask it. A step program has the passes in
this order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class PipelineError(ValueError):
    """A pipeline that cannot run; the message says why and what to change."""


class Kind(enum.IntEnum):
    """The computation of a pass.

    Values; the gradients of inputs and weights; those of inputs alone, which the stage before waits
    for; those of weights alone, which no stage waits for.
    """

    FORWARD = 0
    BACKWARD = 1
    INPUTS = 2
    WEIGHTS = 3


class Pass(NamedTuple):
    """One pass of `stage`, of micro-batch `number`."""

    stage: int
    number: int
    kind: Kind


# Of a group of devices, given its number, the groups, the stages and the micro-batches.
Order = Callable[[int, int, int, int], Iterable[Pass]]
# Whether groups, stages and micro-batches can be: "", or what is wrong, as the end of a sentence.
Needs = Callable[[int, int, int], str]
# Given groups, micro-batches, and which part of both passes the forward pass takes.
Waits = Callable[[int, int, float], float]


def looped(groups: int, stages: int) -> tuple[int, ...]:
    """The group of every stage where groups take stages in turn."""
    return tuple(stage % groups for stage in range(stages))


def _anything(_groups: int, _stages: int, _micro_batches: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One pipeline schedule.

    Attributes:
        name: in plans and in messages; that of `torch.distributed.pipelining`, if it has the
            schedule.
        order: the passes of one group of devices, in their order; a pure function. How many
            micro-batches wait in a stage, and so its memory, follows from it.
        stages_per_group: how many stages each group has; None: any number.
        homes: the group of every stage, given groups and stages.
        needs: what else groups, stages and micro-batches must be.
        splits_backward: whether backward passes are made in halves, for inputs and for weights.
        waits: lower bound on the time in which groups wait, in units of what one micro-batch takes
            in all stages; None: no better one is known than that a micro-batch passes all stages.
        tried: numbers of stages per group that a search tries once it knows the best pipeline.
        weights: of an asynchronous schedule, which versions of the weights its passes use; None:
            the pipeline flushes before the update and trains as one device does.
    """

    name: str
    order: Order
    stages_per_group: int | None = 1
    homes: Callable[[int, int], tuple[int, ...]] = looped
    needs: Needs = _anything
    splits_backward: bool = False
    waits: Waits | None = None
    tried: tuple[int, ...] = ()
    weights: str | None = None

    @property
    def asynchronous(self) -> bool:
        """Whether the pipeline never flushes, so that its updates differ from one device's."""
        return self.weights is not None
