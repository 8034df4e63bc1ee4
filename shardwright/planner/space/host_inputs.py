"""Inputs of recomputed segments that may wait in the memory of the host, and their cost.

A recomputed segment keeps its input until it runs again. On the host the input takes no memory of
the device, but a copy to the host and one back. Copies of all segments share a stream for each
direction, so the time that they add to a step is a maximum of two sums. The tables have an additive
estimate: of each copy the part that is longer than the least time in which the segment computes,
and the launches. If no copy is longer, each ends before the next one starts, and only the first
copy back is not hidden. The simulation of a plan decides what copies really cost.

Offered are segments with one input of their own, read by no other segment and not returned
(`program/lower/segments/boundaries.py`), that at most one operator saves where nothing is
recomputed; an input that several save belongs to its producer in the tables. The last segment runs
again at once, so its input stays; in folded spaces it is offered nevertheless, because layers with
different choices do not fold, and programs keep it on the device. All inputs may have equal shares
of the memory of the host, so together they never exceed it.

Paper: Rhu et al. 2016 (arXiv 1602.08124), vDNN. Deviation: only inputs of recomputed segments are
copied, and the search decides for each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from shardwright.ir.graph import Op
from shardwright.planner.space.clusters import Clusters
from shardwright.program.lower.segments.boundaries import LEAST_BYTES
from shardwright.solve.elimination.problem import Floats, Ints
from shardwright.solve.elimination.recompute_choice import HostChoice


class InputRead(NamedTuple):
    """A value, the operator that reads it, and the node whose edge has the cost of the read."""

    value: str
    reader: Op
    node: int


@dataclass(frozen=True, slots=True, eq=False)
class HostInput:
    """The input of a segment, with the operator that reads it first and the cost of each place."""

    segment: int
    reader: Op
    choice: HostChoice


@final
class HostInputs:
    """Finds the inputs that may wait on the host, and prices their copies.

    Args:
        clusters: the nodes of operators.
        segment: the segment of each operator that is in one.
        segment_of: the segment of each node that may be recomputed.
        recomputed: every operator that may be recomputed, with those that are recomputed with it.
        share: bytes of the memory of the host for each input; None if all stay on the device.
        last_moves: whether that of the last segment may wait there, too.
    """

    def __init__(
        self,
        clusters: Clusters,
        segment: Mapping[str, int],
        segment_of: Mapping[int, int],
        recomputed: Mapping[str, frozenset[str]],
        share: int | None,
        *,
        last_moves: bool = False,
    ) -> None:
        self._clusters, self._model, self._segment = clusters, clusters.model, segment
        self._segment_of, self._recomputed, self._share = segment_of, recomputed, share
        self._last_moves = last_moves
        self.found: list[HostInput] = []
        self._tables: dict[object, tuple[Floats, Ints]] = {}

    def offers(self, reads: InputRead, kept: Ints) -> bool:
        """Whether an input, of `kept` bytes by the choice of its source, may wait on the host.

        If so, it is added to `found`.
        """
        segment = self._segment[reads.reader.name]
        if self._own_inputs.get(segment) != reads.value:
            return False
        source = self._clusters.written[reads.value].node
        assert source is not None, "a value without a node has no edge"
        key = kept.tobytes(), self._least_seconds[segment]
        if key not in self._tables:
            time = np.stack([np.zeros(len(kept)), self._exposed_seconds(kept, segment)], axis=1)
            self._tables[key] = time, np.stack([kept, np.zeros_like(kept)], axis=1)
        choice = HostChoice(reads.value, source, reads.node, *self._tables[key])
        self.found.append(HostInput(segment, reads.reader, choice))
        return True

    @cached_property
    def _own_inputs(self) -> Mapping[int, str]:
        """For each segment that has one input of its own its name; none without a host."""
        if self._share is None:
            return {}
        graph, written = self._model.graph, self._clusters.written
        returned = {*graph.outputs, *(value for _, value in graph.updates)}
        inputs: dict[int, dict[str, None]] = defaultdict(dict)
        readers: dict[str, set[int]] = defaultdict(set)
        for op in graph.ops:
            if op.name not in self._recomputed:
                continue
            segment = self._segment[op.name]
            for value in op.operands:
                source = written.get(value)
                if source is None or source.node is None:
                    continue
                if self._segment_of.get(source.node) != segment:
                    inputs[segment][value] = None
                    readers[value].add(segment)
        last, found = max(inputs, default=0), dict[int, str]()
        for segment, values in inputs.items():
            own = [one for one in values if len(readers[one]) == 1 and one not in returned]
            if len(own) == 1 and (segment != last or self._last_moves):
                (found[segment],) = own
        return found

    @cached_property
    def _least_seconds(self) -> Mapping[int, float]:
        """For each segment the least seconds of its forward pass, in all micro-batches."""
        found: dict[int, float] = defaultdict(float)
        for op in self._model.graph.ops:
            if op.name in self._recomputed:
                forward = self._model.operator(op).seconds - self._model.backward_seconds(op)
                found[self._segment[op.name]] += max(0.0, float(forward.min()))
        return found

    def _exposed_seconds(self, kept: Ints, segment: int) -> Floats:
        """Seconds of both copies that the segment does not hide; infinite if it must not go."""
        machine, count = self._model.machine, self._model.micro_batches
        rate = machine.device.host_bytes_per_s
        assert rate is not None, "inputs of machines without a host stay on the device"
        copy = kept * (count / rate)
        seconds = 2 * copy
        if machine.backend_spec.device != "cpu":  # its host copies take the time of operators
            least = self._least_seconds[segment]
            seconds = np.maximum(0.0, copy - least) + np.maximum(0.0, copy - 2 * least)
        launches = 2 * count * machine.device.launch_seconds
        fits = (kept >= LEAST_BYTES) & (kept <= (self._share or 0))
        return np.where(fits, seconds + launches, np.inf)


def staying(
    segments: Mapping[int, int], hosts: Mapping[int, int], choice: Sequence[int]
) -> list[int]:
    """The recomputed segments whose inputs do not wait on the host.

    That of the last segment never does, so all stay if it alone was to wait there.

    Args:
        segments: numbers of segments in their order, by the node that switches recomputation.
        hosts: by that node the one whose choice 1 is the host.
        choice: the choice of every node.
    """
    every = [*segments.values()]
    stay = [n for one, n in segments.items() if one not in hosts or choice[hosts[one]] != 1]
    return every if len(every) - len(stay) == 1 and max(every) not in stay else stay
