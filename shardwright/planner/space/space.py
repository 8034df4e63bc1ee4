"""The search space of plans on one mesh: the options of every operator and parameter.

A node is a cluster of operators (`clusters.py`) with the options of its leader, or a parameter with
its possible storage layouts. An edge is a value that one node writes and the other reads. Operators
of one kind that read the same value, such as the three projections of an attention, share a third
kind of node, a reading: its choice is the one layout to which the value is redistributed for all of
them. Sharded storage (ZeRO, FSDP) needs no special case: the edge of a parameter that is stored as
Shard and read as Replicate has the cost of the all-gather, and of the reduce-scatter of the
gradient. The gathered copy is kept until the backward pass, or gathered again there.
Checkpoint segments (`checkpoint_segments.py`) keep what autograd saves or are recomputed; each of
their nodes exists twice, once for either case (`solve/elimination/recompute_choice.py`). Inside of
a recomputed segment single operators may be kept (`kept_operators.py`), and its input may wait in
the memory of the host (`host_inputs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwright.ir.graph import Leaf
from shardwright.ir.layout import Layout
from shardwright.planner.space.assembly import FREE, Assembly, Reading, Skeleton, Storage
from shardwright.planner.space.checkpoint_segments import checkpoint_segments
from shardwright.planner.space.clusters import OpNode
from shardwright.planner.space.folding import fold
from shardwright.planner.space.host_inputs import HostInput
from shardwright.planner.space.kept_operators import KeptOperator
from shardwright.planner.space.repeats import Repeat, find_repeats
from shardwright.planner.tables.model import CostModel
from shardwright.rules.rule import Tiling
from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import Assignment, Edge, Floats, Ints, Problem
from shardwright.solve.elimination.recompute_choice import RecomputeChoice, with_recompute_choice
from shardwright.solve.elimination.solver import Solver, make_solver
from shardwright.solve.folding.folded import Folded

_MOST_TABLE = 500_000  # nodes are pinned if tables have more entries per weight


class TooWideError(Exception):
    """The tables with recomputation would be too large; `SpaceFactory` catches it."""


@dataclass(frozen=True, eq=False)
class Space:
    """A problem and the meaning of its choices.

    Nodes are in this order: clusters, readings, parameters, then the twins and switches of segments
    that may be recomputed, and what decides which of their operators are kept and where inputs
    wait.

    Attributes:
        model: the cost model that priced it.
        op_nodes: the node of every operator, by name.
        readings: the readings, in the order of their nodes.
        parameters: the parameters, in the order of their nodes.
        stored: for each parameter the ways to store it.
        folded: the problem, in which each run of repeats occurs once.
        first_reading: the node of the first reading.
        segment_of: the segment of each node that may be recomputed.
        recompute_choice: the twins, switches and other nodes that recomputation adds.
        kept: the problem without recomputation.
        recomputed: for each operator that may be recomputed all that are recomputed with it.
        kept_operators: the operators that may be kept while their segment is recomputed.
        host_inputs: the inputs that may wait on the host until their segment is recomputed.
    """

    model: CostModel
    op_nodes: Mapping[str, OpNode]
    readings: tuple[Reading, ...]
    parameters: tuple[Leaf, ...]
    stored: tuple[Storage, ...]
    folded: Folded
    first_reading: int
    segment_of: Mapping[int, int]  # node -> its segment
    recompute_choice: RecomputeChoice
    kept: Problem
    recomputed: Mapping[str, frozenset[str]]  # operator -> all that it may be recomputed with
    kept_operators: tuple[KeptOperator, ...]  # that may be kept while their segment is recomputed
    host_inputs: tuple[HostInput, ...]  # that may wait on the host while it is recomputed

    @cached_property
    def solver(self) -> Solver:
        """Finds the best assignments of `folded`."""
        return make_solver(self.folded, _MOST_TABLE)

    @cached_property
    def prices(self) -> PriceList:
        """Prices whole assignments."""
        return PriceList.of(self.folded)

    @property
    def problem(self) -> Problem:
        """The problem in which each run of repeats occurs once."""
        return self.folded.problem

    @property
    def first_parameter(self) -> int:
        """The node of the first parameter."""
        return self.first_reading + len(self.readings)

    def option(self, op_node: OpNode, choice: Sequence[int]) -> int:
        """The option of the operator at `op_node` under an assignment of `problem`."""
        k = 0 if op_node.node is None else self.present(op_node.node, choice)
        return int(op_node.options[k])

    def present(self, node: int, choice: Sequence[int]) -> int:
        """The choice of a node, or of its twin if the node is absent."""
        absent = choice[node] == self.kept.nodes[node].num_choices
        return choice[self.recompute_choice.twins[node] if absent else node]

    def tilings(self, choice: Sequence[int]) -> dict[str, Tiling]:
        """Tiling of every operator under an assignment of `problem`."""
        rules = self.model.analysis.rules
        return {
            op.name: self.model.options(op).tiling(
                rules[op.name], self.option(self.op_nodes[op.name], choice)
            )
            for op in self.model.graph.ops
        }

    def storage(self, choice: Sequence[int]) -> dict[str, Layout]:
        """Storage layout of every parameter under an assignment of `problem`."""
        return {
            leaf.name: self.model.layout(leaf.name, int(stored.codes[self.present(node, choice)]))
            for node, (leaf, stored) in enumerate(
                zip(self.parameters, self.stored, strict=True), self.first_parameter
            )
        }

    @cached_property
    def keep_nodes(self) -> Mapping[str, int]:
        """For every operator that may be kept the node that decides whether it is."""
        both = zip(self.kept_operators, self.recompute_choice.keeps, strict=True)
        return {name: node for kept, node in both for name in kept.ops}

    @cached_property
    def most_copy_seconds(self) -> float:
        """The most seconds of copies to the host and back in the time of an assignment."""
        if not self.host_inputs:
            return 0.0
        found, copies = 0.0, np.bincount(self.folded.node_tables())
        for one, node in zip(self.host_inputs, self.recompute_choice.hosts, strict=True):
            seconds = one.choice.time[:, 1]
            found += copies[node] * float(seconds[np.isfinite(seconds)].max(initial=0.0))
        return found

    @property
    def folded_without_copies(self) -> Folded:
        """`folded`, in which copies to the host and back take no time."""
        hosts, known = set(self.recompute_choice.hosts), dict[int, Floats]()

        def free(edge: Edge) -> Edge:
            if edge.head not in hosts:
                return edge
            if id(edge.time) not in known:  # equal tables are one array, by which nodes are merged
                known[id(edge.time)] = np.where(np.isfinite(edge.time), 0.0, np.inf)
            return Edge(edge.tail, edge.head, known[id(edge.time)], edge.memory)

        edges = [free(edge) for edge in self.problem.edges]
        return replace(self.folded, problem=Problem.unchecked(self.problem.nodes, edges))

    @cached_property
    def workspaces(self) -> tuple[Ints, ...]:
        """Bytes of the largest workspace among the operators of each node, per choice."""
        found = [np.zeros(node.num_choices, np.int64) for node in self.problem.nodes]
        for op in self.model.graph.ops:
            op_node = self.op_nodes[op.name]
            sizes = self.model.workspace(op)[op_node.options]
            if op_node.node is None:
                found[0] = np.maximum(found[0], sizes)
                continue
            for node in (op_node.node, self.recompute_choice.twins.get(op_node.node, op_node.node)):
                found[node][: len(sizes)] = np.maximum(found[node][: len(sizes)], sizes)
        return tuple(found)

    def assignment(
        self,
        options: Mapping[str, int],
        storage: Mapping[str, int],
        recompute: bool = False,
        kept: Collection[str] = (),
    ) -> Assignment:
        """The assignment closest to these choices: leaders decide for their followers.

        `storage` has the choice of every parameter. `recompute` recomputes all segments, except the
        operators that are `kept`. If the readers of a reading differ, the first of them decides.
        """
        choice = [0] * len(self.problem.nodes)
        for name, op_node in self.op_nodes.items():
            if op_node.leads:
                choice[op_node.own_node] = options[name]
        for i in range(self.first_reading, self.first_parameter):
            choice[i] = self._agree(i, choice)
        for i, leaf in enumerate(self.parameters, self.first_parameter):
            choice[i] = storage[leaf.name]
        for node, twin in self.recompute_choice.twins.items():
            absent = self.kept.nodes[node].num_choices
            choice[node], choice[twin] = (
                (absent, choice[node]) if recompute else (choice[node], absent)
            )
        for switch in self.recompute_choice.switches.values():
            choice[switch] = int(recompute)
        for name, node in self.keep_nodes.items():
            choice[node] |= int(recompute and name in kept)
        for node in self.recompute_choice.hosts:
            choice[node] = 0 if recompute else 2  # on the device, or absent
        return tuple(choice)

    @cached_property
    def _read_by(self) -> dict[int, list[Edge]]:
        """The edges from every reading to its readers."""
        found: dict[int, list[Edge]] = {}
        for edge in self.problem.edges:
            if self.first_reading <= edge.tail < self.first_parameter:
                found.setdefault(edge.tail, []).append(edge)
        return found

    def _agree(self, node: int, choice: list[int]) -> int:
        first, *others = self._read_by[node]
        agreed = int(np.isfinite(first.time[:, choice[first.head]]).argmax())
        for edge in others:
            if not np.isfinite(edge.time[agreed, choice[edge.head]]):
                allowed = np.where(np.isfinite(edge.time[agreed]), 0.0, np.inf)
                choice[edge.head] = int((allowed + self.problem.nodes[edge.head].time).argmin())
        return agreed


def make_space(
    model: CostModel, segments: Sequence[range] | None = None, skeleton: Skeleton = FREE
) -> Space:
    """Every feasible tiling and storage of the model's graph on its mesh, with their costs.

    `segments` of it may be recomputed, by default its `checkpoint_segments`; `skeleton` says which
    operators are decided together.
    """
    if segments is None:
        segments = checkpoint_segments(model.graph, tuple(find_repeats(model.graph)))
    space = make_folded_space(model, (), (), segments, skeleton=skeleton)
    assert space is not None, "a space without repeats is never refused"
    return space


def make_folded_space(
    model: CostModel,
    repeats: Sequence[Repeat],
    skipped: Sequence[int],
    segments: Sequence[range],
    *,
    most_run: float = math.inf,
    skeleton: Skeleton = FREE,
) -> Space | None:
    """The space of a graph in which the second of three copies represents `1 + skipped` copies.

    Args:
        model: the cost model of the short graph.
        repeats: its repeats, with three copies each.
        skipped: for each repeat the number of copies that were left out.
        segments: ranges of operators that may be recomputed; none is in two copies.
        most_run: the most entries of a run's table without recomputation.
        skeleton: which operators are decided together.

    Returns:
        The space, or None if `repeats` do not repeat in the space as they do in the graph.

    Raises:
        TooWideError: there are segments, and the table of a run has more than `most_run` entries.
    """
    # The last layer has the same choices as those before, or they would not fold.
    skeleton = replace(skeleton, last_moves=bool(repeats))
    assembly = Assembly(model, segments, skeleton)
    kept, recomputed = assembly.problem({}), assembly.recomputed()
    if segments and repeats:
        plain = fold(kept, assembly.owners(), repeats, skipped)
        if plain is not None and plain.widest > most_run:
            raise TooWideError
    may_keep = assembly.kept_operators(recomputed)
    once = {name for one in may_keep for name in one.ops}
    again = assembly.problem(recomputed, once) if recomputed else kept
    choices = [one.choice for one in may_keep]
    hosts = [one.choice for one in assembly.host_inputs]
    both = with_recompute_choice(kept, again, assembly.segment_of, choices, hosts)
    owners = assembly.owners()
    owners += [owners[node] for node in both.twins]
    owners += [frozenset({segments[segment].start}) for segment in both.switches]
    owners += [owners[one.node] for one in choices]
    owners += [owners[one.reader] for one in hosts]
    folded = fold(both.problem, owners, repeats, skipped)
    if folded is None:
        return None
    return Space(
        model,
        assembly.clusters.op_nodes,
        tuple(assembly.readings),
        assembly.leaves,
        assembly.storage,
        folded,
        len(assembly.clusters.leaders),
        assembly.segment_of,
        both,
        kept,
        recomputed,
        may_keep,
        assembly.host_inputs,
    )
