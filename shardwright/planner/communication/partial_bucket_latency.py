"""Launch latency of the buckets that a plan for a whole batch leaves partly filled.

In tables every parameter pays the part of a launch that it fills of a full bucket
(`planner/communication/bucketing.py`). A parameter that is gathered while all others are replicated
has a message of its own and pays almost nothing. This file adds the missing part of each bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardwright.ir.plan import Plan, PlannedTransfer
from shardwright.ir.redistribution import Collective
from shardwright.planner.tables.memory import BucketSizes
from shardwright.planner.tables.objective import Objective
from shardwright.simulate.time.comm_buckets import flights_of, sums_of
from shardwright.simulate.time.stragglers import with_more


def with_partial_bucket_latency(plan: Plan, measure: Objective, sizes: BucketSizes) -> Plan:
    """`plan` with the missing part of each bucket's launch added to its transfers and its step."""
    more: defaultdict[int, float] = defaultdict(float)  # by the identity of the transfer
    for message, limit in _messages(plan, sizes, measure.alone_bytes):
        launches = _launch(plan, message[0], measure)
        missing = (1 - _filled(message, limit)) * launches
        for t in message:
            more[id(t)] += missing / len(message)
    return with_more(plan, more)


def _filled(message: Sequence[PlannedTransfer], limit: int) -> float:
    """The part of a message's launch that its transfers pay in tables, at most 1."""
    return min(1.0, sum(min(1.0, t.bytes / limit) for t in message))


def _messages(
    plan: Plan, sizes: BucketSizes, alone_bytes: int | None
) -> Iterator[tuple[Sequence[PlannedTransfer], int]]:
    """The transfers of each message, and the bytes of a full bucket."""
    for bucket in sums_of(plan):
        yield bucket.sums, sizes.sums
    for flight in flights_of(plan):
        for way in (flight.forward, flight.again, flight.backward):
            if message := _shared(way, alone_bytes):
                yield message, sizes.gathers


def _shared(way: Sequence[PlannedTransfer], alone_bytes: int | None) -> list[PlannedTransfer]:
    """The transfers of a bucket without a message of their own (`ir/buckets.py`)."""
    return [t for t in way if alone_bytes is None or t.bytes < alone_bytes]


def _launch(plan: Plan, one: PlannedTransfer, measure: Objective) -> float:
    """Seconds of the launches of all steps of a transfer."""
    total = 0.0
    for text in one.collectives:
        kind, axis = text.split(" ")
        total += float(measure.launches(Collective(kind))[plan.mesh.names.index(axis)])
    return total
