"""Which pipelines a search tries: how many stages, which meshes, how many micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.constraints import Constraint, ConstraintError
from shardwright.ir.machine import Machine
from shardwright.ir.pipeline import PipelineError
from shardwright.search.permitted import allowed_meshes
from shardwright.search.rounds import Rounds

_MOST_STAGES = 64  # that are tried when nobody says how many
_ROUNDS = (1, 2, 4, 8)  # micro-batches for each stage
_WEIGHTS = "spectrain"


def stages_of(machine: Machine, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of stages to search; raises `PipelineError` for those that devices cannot be."""
    devices = machine.devices
    if wanted is None:
        powers = (2**i for i in range(_MOST_STAGES.bit_length()))
        return tuple(count for count in powers if devices % count == 0)
    for count in wanted:
        if count < 1 or devices % count:
            raise PipelineError(
                f"{count} stages cannot share the {devices} devices of {machine.name} evenly; take"
                " a divisor of that"
            )
    return tuple(sorted(set(wanted))) or (1,)


def pipe(
    rounds: Rounds,
    groups: int,
    micro_batches: Sequence[int] | None,
    wanted: Sequence[Constraint],
    seconds: float,
    *,
    allow_async: bool = False,
) -> None:
    """Search pipelines of `groups` stages on every mesh that one group of devices can be.

    Asynchronous ones have one device a stage, and are searched with `allow_async`.
    """
    several = micro_batches is not None and tuple(micro_batches) != (1,)
    asked = micro_batches if several else tuple(groups * count for count in _ROUNDS)
    counts, _ = rounds.sources.possible(asked)
    try:
        meshes = allowed_meshes(rounds.machine.devices // groups, wanted)
    except ConstraintError as e:
        rounds.refuse(e)
        return
    for mesh in meshes if allow_async and rounds.machine.devices == groups else ():
        try:
            rounds.pipe(mesh, groups, 1, seconds, compare=False, weights=_WEIGHTS)
        except ConstraintError as e:
            rounds.refuse(e)
    for mesh in meshes:
        useful = True
        for count in sorted(set(counts)):
            if not useful:
                break  # more micro-batches only cost more from here on
            try:
                alone = len(mesh.axes) == 1 and not wanted
                useful = rounds.pipe(mesh, groups, count, seconds, compare=alone)
            except ConstraintError as e:
                rounds.refuse(e)
