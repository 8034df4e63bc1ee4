"""The redistributions of one read, one by one, as plans list them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.ir.layout import Atoms, Mesh, Seconds
from shardwright.ir.plan import Phase, Transfer
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
) -> Iterator[Transfer]:
    """What is moved on each of `moves`: phase, layout before and after, how often a step."""
    for phase, start, end, times in moves:
        src, dst = (decode(code, atoms, mesh) for code in (start, end))
        steps = list(priced_steps(atoms, item_bytes, src, dst, machine))
        if steps:
            yield Transfer(
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


def moves_of(
    source: int,
    want: tuple[int, int],
    back: int,
    axes: int,
    micro_batches: int,
    *,
    again: bool,
    kept: bool = False,
) -> list[tuple[Phase, int, int, int]]:
    """Ways of a value to what is wanted (layout, gradient's layout), and of its gradient `back`.

    The forward one is made `again` in the backward pass where nothing of it is kept; what is `kept`
    is made once for all micro-batches.
    """
    layout, grad = want
    moves = [(Phase.FORWARD, source, layout, 1 if kept and not again else micro_batches)]
    if again:
        moves.append((Phase.RECOMPUTE, source, layout, micro_batches))
    if back != NO_GRADIENT:
        (dual,) = duals(np.array([source]), axes).tolist()
        (summed,) = summed_gradients(np.array([source]), np.array([grad]), axes).ravel()
        if back == SUMMED_FIRST:
            moves.append((Phase.BACKWARD, grad, int(summed), micro_batches))
            moves.append((Phase.BACKWARD, int(summed), dual, 1))
        else:
            moves.append((Phase.BACKWARD, grad, dual, micro_batches))
    return moves
