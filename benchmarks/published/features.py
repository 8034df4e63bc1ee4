"""What a priced step consists of: kernels, transfers and updates, without their seconds.

A change of cost figures is scored from these in seconds (`fit.py`), without pricing anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.published.row import Row
from shardwright.ir.plan import Plan
from shardwright.planner.plans.candidate import Candidate
from shardwright.simulate.costs.compute import backward_kernels, forward_kernels
from shardwright.simulate.costs.kernels import KernelWork
from shardwright.simulate.costs.workload import OperatorClass, Workload

FOLDER = Path(__file__).with_name("features.rows")  # git ignores it
FORWARD, BACKWARD, AGAIN = range(3)
# stage, pass, kind, dtype, flop, bytes, rows, columns, depth, count
KernelKey = tuple[int, int, str, str, int, int, int, int, int, int]
# stage, phase, collectives, bytes, of a parameter
TransferKey = tuple[int, str, tuple[str, ...], int, bool]


@dataclass(frozen=True)
class Features:
    """The parts of a step.

    Attributes:
        key: of the row.
        mesh: its axes with their sizes, outermost first.
        micro_batches: of a step.
        stages: of the pipeline, 1 without.
        groups: of devices, that take turns at stages.
        schedule: of the pipeline.
        kernels: how often each runs in one micro-batch.
        transfers: how often each runs in a step.
        updates: bytes of stored tiles of a stage's parameters, one each.
        receives: seconds of one micro-batch's values into every stage but the first.
    """

    key: str
    mesh: tuple[tuple[str, int], ...]
    micro_batches: int
    stages: int
    groups: int
    schedule: str
    kernels: Counter[KernelKey]
    transfers: Counter[TransferKey]
    updates: Counter[tuple[int, int]]
    receives: tuple[float, ...]


def features_of(row: Row, candidate: Candidate, plan: Plan) -> Features:
    """The features of a priced row."""
    writer = candidate.writer
    choice = candidate.point.choice
    number = {op.name: i for i, op in enumerate(writer.graph.ops)}
    cuts = [number[name] for name in plan.cuts]

    def stage(name: str) -> int:
        return int(np.searchsorted(cuts, number.get(name, 0), "right"))

    kernels: Counter[KernelKey] = Counter()
    model = writer.space.model
    known: dict[tuple[int, int, int], list[tuple[int, KernelWork]]] = {}
    for op, like, option, again in writer.options_chosen(choice):
        work = model.meshless.workload(like)
        sizes = model.options(like).sizes[:, option : option + 1]
        at = id(work), id(model.options(like)), option
        if at not in known:
            known[at] = list(_passes(work, sizes))
        for phase, kernel in known[at]:
            key = _key(kernel)
            kernels[(stage(op.name), phase, *key)] += 1
            if phase == FORWARD and again:
                kernels[(stage(op.name), AGAIN, *key)] += 1
    parameters = {one.name for one in plan.parameters}
    transfers: Counter[TransferKey] = Counter()
    for one in plan.transfers:
        mine = one.value in parameters
        at_stage = stage(one.consumer)
        transfers[at_stage, one.phase.value, one.collectives, one.bytes, mine] += one.times
    updates: Counter[tuple[int, int]] = Counter()
    for one_parameter in plan.parameters:
        readers = writer.graph.consumers[one_parameter.name]
        updates[stage(readers[0].name), one_parameter.bytes] += 1
    return Features(
        row.key,
        plan.mesh.axes,
        plan.micro_batches,
        plan.stages,
        plan.mesh.axes[0][1] if plan.stages > 1 else 1,
        plan.schedule,
        kernels,
        transfers,
        updates,
        tuple(plan.receive_seconds),
    )


def _passes(work: Workload, sizes: np.ndarray) -> Iterator[tuple[int, KernelWork]]:
    yield from ((FORWARD, kernel) for kernel in forward_kernels(work, sizes))
    if work.has_backward:
        yield from ((BACKWARD, kernel) for kernel in backward_kernels(work, sizes))
        for result, more in zip(work.results, work.added, strict=False):
            if more:
                nothing = np.zeros(1, np.int64)
                moved = 3 * result.local_bytes(sizes)
                yield from [
                    (BACKWARD, KernelWork(OperatorClass.MEMORY, work.dtype, nothing, moved))
                ] * more


def _key(kernel: KernelWork) -> tuple[str, str, int, int, int, int, int, int]:
    shape = kernel.shape
    sizes = (0, 0, 0, 0)
    if shape is not None:
        sizes = tuple(int(n[0]) for n in (shape.rows, shape.columns, shape.depth, shape.count))  # type: ignore[assignment]
    flop = kernel.flop if kernel.tiled_flop is None else kernel.tiled_flop  # rows are of GPUs
    return (kernel.kind.value, kernel.dtype, int(flop[0]), int(kernel.moved[0]), *sizes)
