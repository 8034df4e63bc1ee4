"""Peak memory of one rank, by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardwright.ir.layout import Bytes

NOTHING = Bytes(0)

# The parts of the peak, and their names in output.
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

    `module` is its path, "" the model itself; None for bytes of no one module, such as buffers of
    collectives for several modules' parameters. `part` is one of `PARTS`.
    """

    module: str | None
    part: str
    bytes: Bytes


class Moment(NamedTuple):
    """Bytes that are alive in a step beside parameters, optimizer state and batch.

    Attributes:
        what: what runs then, by module.
        gradients: as in `Memory`.
        saved: as in `Memory`.
        gathered: parameters that were gathered from other ranks.
        workspace: as in `Memory`.
        communication: as in `Memory`.
    """

    what: str
    gradients: Bytes
    saved: Bytes
    gathered: Bytes
    workspace: Bytes
    communication: Bytes

    @property
    def total(self) -> Bytes:
        """Bytes of all of them."""
        return Bytes(sum(self[1:]))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors at the peak, on the rank that needs most; the parts add up to `peak`.

    Attributes:
        parameters: parameters and their gathered copies at that moment.
        gradients: gradients of parameters at that moment.
        optimizer_state: state of the optimizer.
        batch: inputs, buffers and constants.
        saved: what autograd keeps for the backward pass.
        workspace: operands, results, gradients of activations and temporaries.
        communication: buffers of collectives.
        rounding: what the allocator hands out beyond what is asked for.
        context: memory of the driver and its libraries, which no allocator counts.
        libraries: workspaces that libraries keep of the allocator's memory, which it counts.
        reserved: what torch's caching allocator holds of the device after two steps, fragments and
            libraries included; 0 where it is not simulated, as on CPUs.
        host: bytes of the memory of the host that hold offloaded values, at the most.
        rank: the first of the ranks that need most.
        at: the operator, by module, that runs at the peak, and in which pass.
        shares: every part split by module; empty in plans of older versions.
        curve: highest moments of the parts of a step, in order; empty where it was not recorded.
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
    libraries: Bytes = NOTHING
    reserved: Bytes = NOTHING
    host: Bytes = NOTHING
    rank: int = 0
    at: str = ""
    shares: tuple[Share, ...] = ()
    curve: tuple[Moment, ...] = ()

    @classmethod
    def of(cls, found: Iterable[Share], *, rank: int, at: str, context: Bytes = NOTHING) -> Memory:
        """The memory that these shares add up to."""
        shares = tuple(share for share in found if share.bytes)
        parts: Counter[str] = Counter()
        for share in shares:
            parts[share.part] += share.bytes
        sizes = {name: Bytes(parts[name]) for name in PARTS}
        return cls(**sizes, context=context, rank=rank, at=at, shares=shares, curve=())

    @property
    def peak(self) -> Bytes:
        """Bytes of all parts, which are of tensors: without context and libraries."""
        return Bytes(sum(self.parts().values()))

    def parts(self) -> dict[str, Bytes]:
        """The parts that add up to the peak, by name."""
        return {name: getattr(self, name) for name in PARTS}


def as_json(memory: Memory | None) -> dict[str, Any] | None:
    """All fields by name, for `--json`; None for memory that was not simulated."""
    if memory is None:
        return None
    rows = {name: [one._asdict() for one in getattr(memory, name)] for name in ("shares", "curve")}
    return {**asdict(memory), **rows}
