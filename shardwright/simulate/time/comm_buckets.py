"""Groups the transfers of a plan for a whole batch into the buckets that the runtime uses.

Gradients that are only summed share buckets, and so do copies of sharded parameters and their
gradients (`program/step/passes/bucket.py`), of which bf16 and float32 are not distinguished here: a
plan does not say what a parameter is made of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir.buckets import gather_buckets, gradient_buckets
from shardwright.ir.plan import Phase, Plan, PlannedTransfer
from shardwright.ir.redistribution import Collective

_SUM, _GATHER, _SCATTER = (
    kind.value for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
)
_PHASES = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD
_Phases = defaultdict[Phase, list[PlannedTransfer]]  # what travels for one parameter


@dataclass(frozen=True, slots=True)
class Sums:
    """Gradients that are summed together when operator number `at` has gone backward."""

    at: int
    sums: tuple[PlannedTransfer, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """Copies that travel together to their readers, of which operator number `at` is the first.

    `again` are those among them that are not kept but gathered once more, `backward` the gradients
    of all.
    """

    at: int
    forward: tuple[PlannedTransfer, ...]
    again: tuple[PlannedTransfer, ...]
    backward: tuple[PlannedTransfer, ...]


def sums_of(plan: Plan) -> list[Sums]:
    """The buckets of gradients, in the order of their first readers."""
    known = {op.name: number for number, op in enumerate(plan.ops)}
    summed: defaultdict[tuple[str, ...], list[PlannedTransfer]] = defaultdict(list)
    for t, together in zip(plan.transfers, in_buckets(plan), strict=True):
        if together:
            summed[t.collectives].append(t)
    found = []
    for sent in summed.values():
        sent.sort(key=lambda t: known[t.consumer])
        for places in gradient_buckets([t.bytes for t in sent]):
            bucket = tuple(sent[place] for place in places)
            found.append(Sums(known[bucket[0].consumer], bucket))
    return sorted(found, key=lambda bucket: bucket.at)


def in_buckets(plan: Plan) -> list[bool]:
    """For each transfer, whether it sums a gradient while the backward pass goes on.

    So it is where the one reader of a parameter takes it as it is stored.
    """
    brought = {t.value for t in plan.transfers if t.phase is not Phase.BACKWARD}
    read_as_stored = {parameter.name for parameter in plan.parameters} - brought
    back: defaultdict[str, int] = defaultdict(int)
    for t in plan.transfers:
        back[t.value] += t.phase is Phase.BACKWARD
    return [
        t.phase is Phase.BACKWARD
        and t.value in read_as_stored
        and back[t.value] == 1
        and all(collective.split(" ")[0] == _SUM for collective in t.collectives)
        for t in plan.transfers
    ]


def flights_of(plan: Plan) -> list[Flight]:
    """The buckets of gathered copies, in the order of their first readers.

    Gathered so is what one operator reads that is not recomputed, where the gradient comes back
    the same way; or does not, as of frozen parameters, which fill buckets of their own.
    """
    place = {op.name: number for number, op in enumerate(plan.ops) if not op.segment}
    readers = Counter(value for op in plan.ops for value in op.reads)
    moved: defaultdict[str, _Phases] = defaultdict(lambda: defaultdict(list))
    for t in plan.transfers:
        moved[t.value][t.phase].append(t)
    trained: list[_Phases] = []
    frozen: list[_Phases] = []
    for parameter in plan.parameters:
        phases = moved[parameter.name]
        if readers[parameter.name] <= 1 and _flies(phases, place, trained=parameter.is_trained):
            (trained if parameter.is_trained else frozen).append(phases)
    found = [*_together(trained, place), *_together(frozen, place)]
    return sorted(found, key=lambda flight: flight.at)


def _together(found: list[_Phases], place: Mapping[str, int]) -> list[Flight]:
    """Full buckets of what travels for one parameter each."""
    found.sort(key=lambda phases: place[phases[Phase.FORWARD][0].consumer])
    kinds = [
        (
            int(phases[Phase.FORWARD][0].bytes),
            tuple(t.collectives for way in (Phase.FORWARD, Phase.BACKWARD) for t in phases[way]),
        )
        for phases in found
    ]
    return [_flight([found[n] for n in numbers], place) for numbers in gather_buckets(kinds)]


def _flies(phases: _Phases, place: Mapping[str, int], *, trained: bool) -> bool:
    """Whether a parameter is gathered for one operator, and its gradient, if any, scattered."""
    there, again, back = (phases[phase] for phase in _PHASES)
    if len(there) != 1 or len(back) != trained or len(again) > 1:
        return False
    if len({t.consumer for t in (*there, *again, *back)}) > 1 or there[0].consumer not in place:
        return False
    if any(t.collectives != there[0].collectives for t in again):
        return False
    word, axis = there[0].collectives[0].split(" ")
    if len(there[0].collectives) != 1 or word != _GATHER:
        return False
    if not trained:
        return True
    rest = [one for one in back[0].collectives if one != f"{_SCATTER} {axis}"]
    return len(rest) == len(back[0].collectives) - 1 and all(
        one.split(" ")[0] == _SUM for one in rest
    )


def _flight(parts: Sequence[_Phases], place: Mapping[str, int]) -> Flight:
    forward, again, back = (
        tuple(t for phases in parts for t in phases[phase]) for phase in _PHASES
    )
    return Flight(min(place[t.consumer] for t in forward), forward, again, back)
