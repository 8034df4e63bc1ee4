"""The memory of one rank at the moment of a step when it is most, by what it is for."""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
    that need most.
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

    @property
    def peak(self) -> Bytes:
        """All of it but the context."""
        return Bytes(sum(self.parts().values()))

    def parts(self) -> dict[str, Bytes]:
        """What adds up to the peak, by name."""
        return {name: getattr(self, name) for name in PARTS}


def as_json(memory: Memory | None) -> dict[str, int | str] | None:
    """Everything of it by name, for `--json`; None where it was not settled."""
    return None if memory is None else asdict(memory)
