"""Instructions that are recomputed together, brought together."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.lower.program import Instruction, Load, Redistribute


def reads(instruction: Instruction) -> tuple[str, ...]:
    """The values that an instruction needs."""
    if isinstance(instruction, Redistribute):
        return (instruction.value,)
    if isinstance(instruction, Load):
        return (instruction.leaf,)
    return instruction.op.operands


def writes(instruction: Instruction) -> tuple[str, ...]:
    """The values that an instruction makes."""
    if isinstance(instruction, Redistribute | Load):
        return (instruction.result,)
    return instruction.op.outputs


def together(
    instructions: Sequence[Instruction], pieces: Sequence[int]
) -> tuple[tuple[Instruction, ...], tuple[int, ...]]:
    """Reordered so that every piece is in one place; 0 is no piece.

    What lies between goes in front of its piece, or behind it where it needs
    something of it. Nothing in a piece may need that.
    """
    order: list[int] = []
    taken: set[int] = set()
    for i, piece in enumerate(pieces):
        if i in taken:
            continue
        if not piece:
            order.append(i)
            continue
        members = [j for j in range(i, len(pieces)) if pieces[j] == piece]
        made = {name for j in members for name in writes(instructions[j])}
        behind = []
        for j in range(i, members[-1]):
            if pieces[j] != piece and j not in taken:
                if made & set(reads(instructions[j])):
                    made |= set(writes(instructions[j]))
                    behind.append(j)
                else:
                    order.append(j)
        order += [*members, *behind]
        taken.update(range(i, members[-1] + 1))
    return tuple(instructions[i] for i in order), tuple(pieces[i] for i in order)
