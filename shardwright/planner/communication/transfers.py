"""Lists the redistributions of one read as a plan's transfers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardwright.ir.layout import Atoms, Mesh, Seconds
from shardwright.ir.plan import Phase, PlannedTransfer
from shardwright.machine.model import Machine
from shardwright.planner.communication.resharding import NO_GRADIENT, SUMMED_FIRST
from shardwright.planner.tables.layout_codes import decode, duals, summed_gradients
from shardwright.simulate.costs.collectives import priced_steps


def transfers(
    value: str,
    consumer: str,
    moves: list[tuple[Phase, int, int, int]],
    atoms: Atoms,
    item_bytes: int,
    machine: Machine,
    mesh: Mesh,
) -> Iterator[PlannedTransfer]:
    """The transfers of `moves`: (phase, code before, code after, times a step) each."""
    for phase, start, end, times in moves:
        src, dst = (decode(code, atoms, mesh) for code in (start, end))
        steps = list(priced_steps(atoms, item_bytes, src, dst, machine))
        if steps:
            yield PlannedTransfer(
                value=value,
                consumer=consumer,
                phase=phase,
                collectives=tuple(
                    f"{s.collective.value} {mesh.names[s.axis]}" for s, _, _ in steps
                ),
                bytes=max(size for _, size, _ in steps),
                seconds=Seconds(times * sum(seconds for _, _, seconds in steps)),
                times=times,
            )


class Rounds(NamedTuple):
    """The numbers of times that the moves of one read are made in a step.

    Attributes:
        micro_batches: their number.
        again: whether the backward pass repeats the forward move.
        kept: whether the forward move is made once for all micro-batches.
        sync: after which micro-batches gradients are reduced (`ir/gradient_sync.py`).
    """

    micro_batches: int
    again: bool
    kept: bool
    sync: str | None


def moves_of(
    source: int, want: tuple[int, int], back: int, axes: int, rounds: Rounds
) -> list[tuple[Phase, int, int, int]]:
    """The moves of a value to the wanted layout, and of its gradient to the dual of the source.

    Args:
        source: the code of the value's layout.
        want: the codes of the wanted layout and of the gradient's layout.
        back: how the gradient is reduced (`communication/resharding.py`).
        axes: the number of mesh axes.
        rounds: the numbers of repetitions in a step.

    Returns:
        (phase, code before, code after, times a step) for each move.
    """
    layout, grad = want
    micro_batches, once = rounds.micro_batches, rounds.kept and not rounds.again
    moves = [(Phase.FORWARD, source, layout, 1 if once else micro_batches)]
    if rounds.again:
        moves.append((Phase.RECOMPUTE, source, layout, micro_batches))
    if back != NO_GRADIENT:
        (dual,) = duals(np.array([source]), axes).tolist()
        ends = np.array([source]), np.array([grad])
        (summed,) = summed_gradients(*ends, axes, rounds.sync).ravel()
        if back == SUMMED_FIRST:
            moves.append((Phase.BACKWARD, grad, int(summed), micro_batches))
            moves.append((Phase.BACKWARD, int(summed), dual, 1))
        else:
            moves.append((Phase.BACKWARD, grad, dual, micro_batches))
    return moves
