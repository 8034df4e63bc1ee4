"""Peak memory of one rank, by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardwright.ir.layout import Bytes

NOTHING = Bytes(0)

# What the parts are called where people read them.
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "batch": "batch and buffers",
    "saved": "saved for backward",
    "workspace": "workspace",
    "communication": "communication",
    "rounding": "rounding",
}
STATE = ("parameters", "gradients", "optimizer_state")


class Share(NamedTuple):
    """Bytes of one part of the peak that belong to one module.

    `module` is its path, "" the model itself; None where they belong to none, as buffers of
    collectives in which several modules' parameters are sent. `part` is one of `PARTS`.
    """

    module: str | None
    part: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors at the peak, on the rank that needs most; they add up to `peak`.

    * `parameters`, `optimizer_state`, `gradients`: as far as they are there at that moment;
    * `batch`: inputs, buffers and constants;
    * `saved`: what autograd keeps for the backward pass;
    * `workspace`: operands, results, gradients on their way and temporaries;
    * `communication`: buffers of collectives;
    * `rounding`: what the allocator hands out beyond what is asked for.

    `context` is what the driver and its libraries take beside, which no allocator counts. `at` is
    the operator, by module, that runs at that moment, and in which pass; `rank` the first of those
    that need most. `shares` says what belongs to which module, each module and part once: those of
    a part add up to it. There are none where that is not known, as in plans of older versions.

    A pipeline's memory is what the tables of the search add up to on the group that needs most:
    `at` is empty.
    """

    parameters: Bytes
    gradients: Bytes
    optimizer_state: Bytes
    batch: Bytes
    saved: Bytes
    workspace: Bytes
    communication: Bytes
    rounding: Bytes = NOTHING
    context: Bytes = NOTHING
    rank: int = 0
    at: str = ""
    shares: tuple[Share, ...] = ()

    @classmethod
    def of(cls, found: Iterable[Share], *, rank: int, at: str, context: Bytes = NOTHING) -> Memory:
        """The memory that these shares add up to."""
        shares = tuple(share for share in found if share.bytes)
        parts: Counter[str] = Counter()
        for share in shares:
            parts[share.part] += share.bytes
        sizes = {name: Bytes(parts[name]) for name in PARTS}
        return cls(**sizes, context=context, rank=rank, at=at, shares=shares)

    @property
    def peak(self) -> Bytes:
        """All of it but the context."""
        return Bytes(sum(self.parts().values()))

    def parts(self) -> dict[str, Bytes]:
        """What adds up to the peak, by name."""
        return {name: getattr(self, name) for name in PARTS}


def as_json(memory: Memory | None) -> dict[str, Any] | None:
    """Everything of it by name, for `--json`; None where it was not settled."""
    if memory is None:
        return None
    return {**asdict(memory), "shares": [share._asdict() for share in memory.shares]}
