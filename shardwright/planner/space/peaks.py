"""Transient memory of plans: operator workspaces, and activations of recomputed segments.

Transient memory is a maximum over a plan, not a sum, so the search does not optimise it; it is
added to the points found. During its backward pass a recomputed segment holds the activations that
it would otherwise have kept since the forward pass. By then everything behind it is free, so the
last segment, where it is kept, adds to sums no more than its second run would hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

import numpy as np

from shardwright.planner.space.space import Space
from shardwright.solve.elimination.pricing import sums
from shardwright.solve.elimination.problem import Floats, Ints, Node, Problem


@final
class Peaks:
    """Computes transient bytes, which add to the summed bytes, of whole assignments of `space`.

    With `in_order` they are those of a step without stages, moment by moment. Otherwise they are an
    upper bound, whatever the order of segments: the largest workspace, and what the recomputed
    segment that holds most has beyond what it keeps.
    """

    def __init__(self, space: Space, *, in_order: bool = False) -> None:
        self.space, self.in_order = space, in_order
        self.problem_node = space.folded.node_tables()  # whole node -> node of the problem
        sizes = [node.num_choices for node in space.problem.nodes]
        self.first = np.cumsum([0, *sizes[:-1]])[self.problem_node]
        self.known: dict[tuple[int, ...], int] = {}  # bytes of whole assignments

    def of(self, choices: Sequence[tuple[int, ...]]) -> list[int]:
        """Bytes for whole assignments, each computed once."""
        new = [one for one in choices if one not in self.known]
        if new:
            self.known.update(zip(new, self.at(np.array(new, np.int64)).tolist(), strict=True))
        return [self.known[one] for one in choices]

    def at(self, choices: Ints) -> Ints:
        """Bytes for whole assignments: (P, nodes) -> (P,)."""
        workspaces = np.concatenate(self.space.workspaces)[self.first + choices]
        found: Ints = workspaces.max(axis=1)
        if not self._switches.size:
            return found
        more, less, behind = self._segment_bytes(choices)
        again = choices[:, self._switches].T == 1
        extra = np.where(again, more - less, 0)
        if self.in_order:
            moments = self._moments(workspaces, more - extra, extra, behind)
            return np.where(again.any(axis=0), moments, found)
        largest: Ints = found + np.maximum(extra, 0).max(axis=0)
        return largest

    def _moments(self, workspaces: Ints, kept: Ints, extra: Ints, behind: Ints) -> Ints:
        """The most bytes of all moments of the backward pass, beside the sums: (P,).

        Where most is kept, the largest workspace outside of segments is there. Later there are the
        workspace of a segment, and what it holds if it runs again, but nothing that the segments
        and operators behind it kept.

        Args:
            workspaces: of all nodes, (P, nodes).
            kept: what each segment keeps, (segments, P).
            extra: what it has beside while it runs again, (segments, P).
            behind: what the operators behind all segments keep, (P,).
        """
        node, twin, switch = self._recomputable
        inside, number = np.zeros_like(extra), np.searchsorted(self._switches, switch)
        for nodes in (node, twin):
            np.maximum.at(inside, number, workspaces[:, nodes].T)
        kept = kept[self._order]
        later = behind + np.cumsum(kept[::-1], axis=0)[::-1] - kept
        outside = workspaces[:, self._outside].max(axis=1, initial=0)
        found: Ints = np.maximum(outside, ((inside + extra)[self._order] - later).max(axis=0))
        return found

    @cached_property
    def least(self) -> int:
        """Bytes that every assignment needs."""
        nodes = self._outside if self.in_order else np.arange(len(self.problem_node))
        each = (self.space.workspaces[node] for node in np.unique(self.problem_node[nodes]))
        return max((int(workspace.min()) for workspace in each), default=0)

    def of_one_choice(self, choice: tuple[int, ...]) -> int:
        """Transient bytes of the choice that needs most in a whole assignment."""
        return int(np.concatenate(self._alone)[self.first + np.array(choice)].max())

    def below(self, most: int) -> Space | None:
        """The space without the choices that alone need `most` transient bytes or more.

        Choices keep their indices. Returns None if a node has no choice left.
        """
        known: dict[tuple[int, int], Floats] = {}  # nodes with equal tables still share them
        nodes = []
        for node, alone in zip(self.space.problem.nodes, self._alone, strict=True):
            key = id(node.time), id(alone)
            if key not in known:
                known[key] = np.where(alone < most, node.time, np.inf)
                known[key].setflags(write=False)
            if not np.isfinite(known[key]).any():
                return None
            nodes.append(Node(node.name, known[key], node.memory))
        problem = Problem.unchecked(nodes, self.space.problem.edges)
        return replace(self.space, folded=replace(self.space.folded, problem=problem))

    @cached_property
    def with_largest_kept(self) -> Space | None:
        """The space in which the last of the largest segments is kept; None if there is none.

        While that segment runs again it holds as much as if it were kept, and no other one, with
        what is kept before it, holds more. So plans that recompute it are none of the best, unless
        most is held before its backward pass begins.
        """
        if not self._switches.size:
            return None
        first = np.zeros((1, len(self.problem_node)), np.int64)
        sizes = self._segment_bytes(first)[0][self._order, 0]
        switch = int(self._switches[self._order[np.flatnonzero(sizes == sizes.max())[-1]]])
        nodes = list(self.space.problem.nodes)
        if switch >= len(nodes) or any(switch in run.nodes for run in self.space.folded.runs):
            return None  # it stands for other copies, too
        nodes[switch] = Node(nodes[switch].name, np.array([0.0, np.inf]), nodes[switch].memory)
        problem = Problem.unchecked(nodes, self.space.problem.edges)
        return replace(self.space, folded=replace(self.space.folded, problem=problem))

    @cached_property
    def _alone(self) -> tuple[Ints, ...]:
        """Transient bytes of each choice of each node: its workspace, or the activations that it
        would keep if it were not recomputed.
        """
        nodes, sizes = self.space.problem.nodes, list(self.space.workspaces)
        for node, twin in self.space.recompute_choice.twins.items():
            again = np.maximum(nodes[node].memory - nodes[twin].memory, 0)
            sizes[twin] = sizes[twin] + again
        shared: dict[bytes, Ints] = {}
        return tuple(shared.setdefault(size.tobytes(), size) for size in sizes)

    @cached_property
    def _recomputable(self) -> tuple[Ints, Ints, Ints]:
        """Nodes of whole assignments that have a twin, their twins, and their switches."""
        both, segment_of = self.space.recompute_choice, self.space.segment_of
        node, twin, switch = self._everywhere(
            [(node, twin, both.switches[segment_of[node]]) for node, twin in both.twins.items()], 3
        )
        return node, twin, switch

    @cached_property
    def _keeping(self) -> tuple[Ints, Ints]:
        """Nodes of whole assignments that keep operators, and the switches of their segments."""
        both, segment_of = self.space.recompute_choice, self.space.segment_of
        kept = zip(self.space.kept_operators, both.keeps, strict=True)
        pairs = [(keep, both.switches[segment_of[one.choice.node]]) for one, keep in kept]
        keep, switch = self._everywhere(pairs, 2)
        return keep, switch

    @cached_property
    def _waiting(self) -> tuple[Ints, Ints]:
        """Nodes of whole assignments that say where inputs wait, and their segments' switches."""
        both = self.space.recompute_choice
        hosts = zip(self.space.host_inputs, both.hosts, strict=True)
        node, switch = self._everywhere([(n, both.switches[one.segment]) for one, n in hosts], 2)
        return node, switch

    def _everywhere(self, groups: Sequence[tuple[int, ...]], size: int) -> Ints:
        """Groups of `size` nodes of the problem, as nodes of all copies: (size, groups)."""
        found = [np.array(groups, np.int64).reshape(-1, size)]
        for number, run in enumerate(self.space.folded.runs):
            at = {node: i for i, node in enumerate(run.nodes)}
            inside = [[at[node] for node in group] for group in groups if group[0] in at]
            rows = self.space.folded.positions(number)[:-1]  # the last copy is the problem's own
            found.append(rows[:, np.array(inside, np.int64).reshape(-1, size)].reshape(-1, size))
        return np.concatenate(found).T

    @cached_property
    def _switches(self) -> Ints:
        """The switches of all segments of whole assignments, sorted: (segments,)."""
        return np.unique(self._recomputable[2])

    @cached_property
    def _outside(self) -> Ints:
        """The nodes of whole assignments that are in no segment."""
        node, twin, _ = self._recomputable
        return np.setdiff1d(np.arange(len(self.problem_node)), np.concatenate([node, twin]))

    @cached_property
    def _order(self) -> Ints:
        """The indices of `_switches` in the order of the graph."""
        place = {switch: (switch, 0, switch) for switch in self._switches.tolist()}
        for number, run in enumerate(self.space.folded.runs):
            inside = [node for node in run.nodes if node in place]
            columns = [run.nodes.index(node) for node in inside]
            for copy, row in enumerate(self.space.folded.positions(number)[:, columns].tolist()):
                place |= {one: (inside[0], copy, own) for one, own in zip(row, inside, strict=True)}
        places = [place[switch] for switch in self._switches.tolist()]
        return np.array(sorted(range(len(places)), key=places.__getitem__))

    @cached_property
    def _behind(self) -> list[int]:
        """The nodes of operators, and of what they read, behind all segments."""
        space, ops = self.space, self.space.model.graph.ops
        number = {op.name: i for i, op in enumerate(ops)}
        nodes = [space.op_nodes[op.name].node for op in ops]
        at = [-1 if node is None else space.segment_of.get(node, -1) for node in nodes]
        end = max(i for i, segment in enumerate(at) if segment == max(at))
        first = {node: i for i, node in reversed(list(enumerate(nodes)))}  # its first operator
        for node, reading in enumerate(space.readings, space.first_reading):
            first[node] = min(number[op.name] for op in reading.readers)
        return [node for node, i in first.items() if node is not None and i > end]

    def _segment_bytes(self, choices: Ints) -> tuple[Ints, Ints, Ints]:
        """Bytes of activations that wait for the backward pass, for whole assignments (P, nodes).

        Returns:
            What each segment keeps, or would if it were not recomputed and copies of its parameters
            were not gathered again, and what it keeps if it is: (segments, P). What the operators
            behind all segments keep: (P,).
        """
        node, twin, switch = self._recomputable
        count = len(self._switches)
        kept = choices.copy()
        kept[:, node] = np.where(choices[:, switch] == 1, choices[:, twin], choices[:, node])
        kept[:, twin] = self._sizes[twin] - 1  # absent
        active = self.problem_node[node] < self.space.first_parameter
        owner = np.searchsorted(self._switches, switch[active]).tolist()
        behind = dict.fromkeys(self._behind, count)
        own = dict(zip(node[active].tolist(), owner, strict=True))
        more = self._kept_bytes(kept, own | behind, count + 1)
        runs_again = choices[:, self._switches].T == 1
        if runs_again.any() and self._regathers:
            # While a segment runs again it holds all copies that its backward pass reads.
            copies = self._with_copies[self.first + kept]
            more[:-1] = np.where(runs_again, self._kept_bytes(copies, own, count), more[:-1])
        again = dict(zip(twin[active].tolist(), owner, strict=True))
        for beside, of in (self._keeping, self._waiting):  # on the device beside the twins
            numbers = np.searchsorted(self._switches, of).tolist()
            again |= zip(beside.tolist(), numbers, strict=True)
        return more[:-1], self._kept_bytes(choices, again, count), more[-1]

    @cached_property
    def _regathers(self) -> bool:
        """Whether copies of a parameter may be gathered again."""
        return any(stored.regathered.any() for stored in self.space.stored)

    @cached_property
    def _with_copies(self) -> Ints:
        """For each choice of the problem's nodes, end to end, the one that keeps copies."""
        found: list[Ints] = [np.arange(node.num_choices) for node in self.space.problem.nodes]
        for node, stored in enumerate(self.space.stored, self.space.first_parameter):
            kept = [stored.find(code, regathered=False) for code in stored.codes.tolist()]
            found[node][: len(kept)] = kept
        return np.concatenate(found)

    @cached_property
    def _sizes(self) -> Ints:
        """The number of choices of each whole node."""
        return np.array(self.space.problem.sizes)[self.problem_node]

    def _kept_bytes(self, choices: Ints, owner: Mapping[int, int], count: int) -> Ints:
        """Bytes of some nodes and of the edges to them, by their owner: (count, P)."""
        prices, rows = self.space.prices, len(choices)
        owners = np.full(choices.shape[1], -1)
        owners[np.fromiter(owner, np.int64, len(owner))] = np.fromiter(
            owner.values(), np.int64, len(owner)
        )
        of_term = owners[prices.head]
        terms = np.flatnonzero(of_term >= 0)
        ends = choices[:, prices.tail[terms]], choices[:, prices.head[terms]]
        sizes = prices.memory[prices.entries(terms, *ends)]
        where = np.arange(rows)[:, None] + rows * of_term[terms]
        found = sums(where.ravel(), sizes.ravel(), count * rows)
        return found.astype(np.int64).reshape(count, rows)
