"""Collectives inside one operator, e.g. in vocabulary-parallel cross entropy.

There are two kinds: reductions of partial results inside the operator (`Rule.internal_reductions`),
and ring attention (`Rule.joint_splits`), in which devices send keys and values around a ring while
they compute with the blocks that have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import ITEM_BYTES, Graph, Op
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.plan import Phase, PlannedTransfer
from shardwright.ir.redistribution import Exchange
from shardwright.machine.model import Machine
from shardwright.machine.topology import Link, links
from shardwright.planner.communication.transfers import transfers
from shardwright.planner.tables.layout_codes import duals
from shardwright.planner.tables.objective import Objective
from shardwright.planner.tables.options import Options
from shardwright.rules.analysis import Analysis
from shardwright.rules.rule import Rule, joint_split
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.costs.compute import backward_seconds, forward_seconds
from shardwright.simulate.costs.workload import Workload

Floats = NDArray[np.float64]


class _Part(NamedTuple):
    """One exchange along `axis` in one phase of one option."""

    phase: Phase
    what: str
    axis: str
    bytes: int
    seconds: float


@final
class IntraOpCollectives:
    """Prices the collectives inside the operators of `graph` on the devices of `mesh`."""

    def __init__(
        self, graph: Graph, analysis: Analysis, machine: Machine, mesh: Mesh, measure: Objective
    ) -> None:
        self._graph, self._analysis = graph, analysis
        self._machine, self._mesh, self._measure = machine, mesh, measure

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        return links(self._machine, self._mesh)

    def seconds(self, op: Op, work: Workload, options: Options, again: bool) -> Floats | float:
        """Seconds of one micro-batch, per option: (K,).

        With `again` the forward pass runs once more in the backward pass.
        """
        rule = self._analysis.rules[op.name]
        if rule.internal_reductions:
            item, axes = self._item_bytes(op), len(self._mesh.axes)
            total = np.zeros(len(options))
            for dims, codes in zip(
                rule.internal_reductions, options.internal_reductions, strict=True
            ):
                total += self._measure.redistributions(
                    rule.atoms(dims), item, codes, duals(codes, axes)
                )
            return total * (1 + again)
        if not rule.joint_splits:
            return 0.0
        return np.array(
            [
                sum(p.seconds for p in self._parts(op, rule, work, options, k, again))
                for k in range(len(options))
            ]
        )

    def transfers(
        self, op: Op, work: Workload, options: Options, k: int, again: bool, times: int
    ) -> list[PlannedTransfer]:
        """The transfers of option `k`, `times` a step, as plans list them."""
        rule, name = self._analysis.rules[op.name], op.outputs[0]
        found: list[PlannedTransfer] = []
        phases = (Phase.FORWARD, Phase.RECOMPUTE) if again else (Phase.FORWARD,)
        for dims, codes in zip(rule.internal_reductions, options.internal_reductions, strict=True):
            before = int(codes[k])
            after = int(duals(codes[k : k + 1], len(self._mesh.axes))[0])
            moves = [(phase, before, after, times) for phase in phases]
            atoms, item = rule.atoms(dims), self._item_bytes(op)
            found += transfers(name, op.name, moves, atoms, item, self._machine, self._mesh)
        for part in self._parts(op, rule, work, options, k, again):
            collectives = (f"{part.what} {part.axis}",)
            seconds = Seconds(part.seconds * times)
            size = Bytes(part.bytes)
            found.append(
                PlannedTransfer(name, op.name, part.phase, collectives, size, seconds, times)
            )
        return found

    def _item_bytes(self, op: Op) -> int:
        """Bytes of an element; reductions are at least in single precision."""
        return max(4, ITEM_BYTES[self._graph.tensor[op.operands[0]].dtype])

    def _parts(
        self, op: Op, rule: Rule, work: Workload, options: Options, k: int, again: bool
    ) -> Iterator[_Part]:
        """The part of a ring's rounds that computation does not hide."""
        shared = joint_split(options.tiling(rule, k))
        if shared is None or "s" not in shared[1].factors:
            return
        axis, sizes = shared[0], options.sizes[:, k : k + 1]
        link, name = self._links[axis], self._mesh.names[axis]
        key, value = (int(work.operands[i].local_bytes(sizes)[0]) for i in (1, 2))
        item = work.operands[1].item_bytes
        sums = (key + value) * max(4, item) // item  # gradients are summed in single precision
        passes = [(Phase.FORWARD, key + value, 0)]
        if again:
            passes.append((Phase.RECOMPUTE, key + value, 0))
        if work.has_backward:
            passes.append((Phase.BACKWARD, key + value, sums))
        for phase, block, back in passes:
            priced = backward_seconds if phase is Phase.BACKWARD else forward_seconds
            step = float(priced(work, sizes, self._machine.device)[0]) / link.ranks
            blocks = [block, back] if back else [block]
            rounds = (link.ranks - 1) * self._round(link, blocks, step)
            if back:
                rounds += self._round(link, [back], 0.0)  # the gradient returns to its rank
            yield _Part(phase, Exchange.RING.value, name, block + back, rounds)

    def _round(self, link: Link, sizes: Sequence[int], step: float) -> float:
        """Seconds to send blocks to the next device, minus the part hidden by `step` seconds."""
        price = step_price(Exchange.RING, link, self._machine)
        sent = sum(price.seconds(size, size) for size in sizes)
        return float(sent - self._machine.soon_overlap * min(sent, step))
