"""A region of a step program: operators without communication between them."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.program.instructions import (
    CALLS,
    Compute,
    Instruction,
    Joint,
    SharedAttention,
)
from shardwright.rules.operators.half_logits import CROSS_ENTROPY


@dataclass(frozen=True, slots=True)
class Region:
    """Operators without communication between them: a function of `inputs`.

    Regions that do the same are one region.

    Attributes:
        variants: the instructions, once for each set of offsets at which tiles start in the whole
            tensor, as micro-batches have them; names of values are the same in all.
        inputs: the names of the inputs inside of the region.
        outputs: the names of the outputs inside of the region.
        trained: for each input whether it has a gradient.
        differentiable: for each output whether it has a gradient.
        dropped: for each input whether nothing of it is saved for the backward pass, which is
            given it again.
    """

    variants: tuple[tuple[Instruction, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trained: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    dropped: tuple[bool, ...]

    @property
    def communicates(self) -> tuple[str, ...]:
        """The mesh axes along which an operator of the region communicates inside of itself."""
        return tuple(dict.fromkeys(a for one in self.variants[0] for a in inner_axes(one)))

    @property
    def is_of_torch(self) -> bool:
        """Whether all its operators save tensors where hooks see them, as PyTorch's own do.

        A custom operator may keep a tensor in another way.
        """
        calls = (one.op for one in self.variants[0] if isinstance(one, CALLS))
        return all(op.target.startswith("aten.") or op.target == CROSS_ENTROPY for op in calls)

    def __str__(self) -> str:
        lines = [f"({', '.join(f'%{name}' for name in self.inputs)}):"]
        lines += [f"    {line}" for one in self.variants[0] for line in str(one).splitlines()]
        lines.append(f"    return {', '.join(f'%{name}' for name in self.outputs)}")
        return "\n".join(lines)


def inner_axes(one: Instruction) -> tuple[str, ...]:
    """The mesh axes along which an operator communicates while it computes."""
    if isinstance(one, Joint):
        return one.axes
    if isinstance(one, SharedAttention):
        return (one.axis,)
    if isinstance(one, Compute) and one.routing is not None:
        return one.routing.axes
    return ()
