"""Builds plans from points of a search: every operator's tiling, every parameter's storage.

The search runs on a shortened graph; the plan names the operators of the whole graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import final

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind, Op
from shardwright.ir.layout import Bytes, Layout, Seconds
from shardwright.ir.options.mixed_precision import dtypes_of
from shardwright.ir.options.optimizers import optimizer_spec, placed
from shardwright.ir.plan import (
    InputSpec,
    Phase,
    Plan,
    PlannedOp,
    PlannedParameter,
    PlannedTransfer,
    Remark,
)
from shardwright.planner.plans.expert_placement import ExpertPlacement, expert_placement
from shardwright.planner.plans.plan_ops import ANYWHERE, Again, PlanEntries
from shardwright.planner.plans.zigzag_swaps import zigzag_swaps
from shardwright.planner.settle import charged_seconds
from shardwright.planner.space.host_inputs import staying
from shardwright.planner.space.peaks import Peaks
from shardwright.planner.space.repeats import ShortGraph
from shardwright.planner.space.space import Space
from shardwright.planner.tables.layout_codes import digits, local_elements
from shardwright.planner.tables.memory import fixed_bytes
from shardwright.rules.rule_notes import remarks
from shardwright.simulate.costs.update import host_group_bytes
from shardwright.solve.elimination.problem import Ints, Point


@final
class PlanBuilder:
    """Turns whole assignments of one space into plans of the whole graph."""

    def __init__(self, space: Space, graph: Graph, short: ShortGraph, optimizer: str) -> None:
        self.space = space
        self.graph = graph
        self.short = short
        self.optimizer = optimizer
        self.transients = Peaks(space)
        self._steps = PlanEntries(space, graph, short)
        self._kept: dict[tuple[str, int, bool], PlannedParameter] = {}
        self._whole_segments: dict[object, list[int]] = {}
        self._tile_bytes: dict[tuple[str, int], Ints] = {}
        self._short_ops = {op.name: op for op in space.model.graph.ops}
        self._fixed_bytes = fixed_bytes(graph)

    @cached_property
    def _remarks(self) -> tuple[Remark, ...]:
        return remarks(self.graph, self.space.model.analysis, self._rep)

    @cached_property
    def _node(self) -> dict[str, tuple[int, int, int] | None]:
        """For every operator and parameter its node in whole assignments, its twin and its switch.

        Twin and switch are -1 if there are none; the value is None if it has no node.
        """
        op_nodes, first = self.space.op_nodes, self.space.first_parameter
        node_of = {op.name: op_nodes[op.name].node for op in self.space.model.graph.ops}
        node_of.update({leaf.name: first + i for i, leaf in enumerate(self.space.parameters)})
        leaves = self.graph.leaves_of(LeafKind.PARAMETER)
        # Operators of one cluster and layer are decided alike.
        known: dict[object, tuple[int, int, int] | None] = {}
        found = {}
        for name in (*(op.name for op in self.graph.ops), *(leaf.name for leaf in leaves)):
            key = node_of[self._rep(name)], self._place(name)
            if key not in known:
                known[key] = self._decision_nodes(name, key[0])
            found[name] = known[key]
        return found

    def least_of_nodes(self, number: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
        """The nodes of operators and parameters with a `number`, each with its least number.

        Yields the node, its switch as in `nodes`, and the number.
        """
        least: dict[tuple[int, int, int, int], int] = {}
        for name, its in number.items():
            decision = self._node[name]
            if decision is not None:
                key = *decision, self._keep_node.get(name, -1)
                least[key] = min(its, least.get(key, its))
        for (node, twin, switch, keep), its in least.items():
            for one in (node, twin, keep):
                if one >= 0:
                    yield one, switch, its

    def nodes(self, name: str) -> tuple[tuple[int, ...], int]:
        """The nodes of an operator or parameter in whole assignments, and its switch.

        Returns:
            The nodes, none if nothing is decided. A second node (the twin) decides if the operator
            is recomputed, a third whether it is kept then. The switch is the node that decides
            whether it is recomputed; -1 if it never is.
        """
        decision = self._node[name]
        if decision is None:
            return (), -1
        keep = (self._keep_node[name],) if name in self._keep_node else ()
        return (*decision[: 1 if decision[1] < 0 else 2], *keep), decision[2]

    @cached_property
    def _keep_node(self) -> dict[str, int]:
        """For operators that may be kept the node in whole assignments that decides it."""
        known = self.space.keep_nodes
        return {
            op.name: self._whole(op.name, known[like])
            for op in self.graph.ops
            if (like := self._rep(op.name)) in known
        }

    def options_chosen(self, choice: Sequence[int]) -> Iterator[tuple[Op, Op, int, bool]]:
        """The option of every operator under a whole assignment, in order.

        Yields the operator, its representative in the short graph, the index among the
        representative's options, and whether the operator is recomputed.
        """
        for op in self.graph.ops:
            like = self._rep(op.name)
            short_op, op_node = self._short_ops[like], self.space.op_nodes[like]
            chosen, switch = self._chosen(op.name, choice)
            yield op, short_op, int(op_node.options[chosen]), switch >= 0

    def segment_nodes(self, names: Iterable[str]) -> list[int]:
        """The nodes of whole assignments that decide whether and how operators are recomputed.

        The operators are those of one checkpoint segment. There are no nodes if nothing of it may
        be recomputed.
        """
        for name in names:
            node = self.space.op_nodes[self._rep(name)].node
            segment = None if node is None else self.space.segment_of.get(node)
            if segment is not None:
                key = segment, self._place(name)
                if key not in self._whole_segments:
                    nodes = self._segments[segment]
                    self._whole_segments[key] = [self._whole(name, one) for one in nodes]
                return self._whole_segments[key]
        return []

    @cached_property
    def _segments(self) -> Mapping[int, list[int]]:
        """The nodes of the problem that decide whether and how a segment is recomputed."""
        both, segment_of = self.space.recompute_choice, self.space.segment_of
        found: dict[int, list[int]] = {}
        for node, segment in segment_of.items():
            found.setdefault(segment, []).append(node)
        for segment, nodes in found.items():
            nodes += [both.twins[node] for node in nodes if node in both.twins]
            nodes.append(both.switches[segment])
        for one, keep in zip(self.space.kept_operators, both.keeps, strict=True):
            found[segment_of[one.choice.node]].append(keep)
        for given, host in zip(self.space.host_inputs, both.hosts, strict=True):
            found[given.segment].append(host)
        return found

    @cached_property
    def _hosts(self) -> Mapping[int, int]:
        """By switch the node that says where the segment's input waits, in whole assignments."""
        both = self.space.recompute_choice
        hosts = zip(self.space.host_inputs, both.hosts, strict=True)
        nodes = {one.reader.name: (both.switches[one.segment], host) for one, host in hosts}
        return {
            self._whole(op.name, nodes[like][0]): self._whole(op.name, nodes[like][1])
            for op in self.graph.ops
            if (like := self._rep(op.name)) in nodes
        }

    def tile_bytes(self, value: str, choices: Ints) -> Ints:
        """Bytes of the largest tile of an operator's result, or of a whole leaf.

        For whole assignments: (P, nodes) -> (P,).
        """
        maker = self.graph.producer.get(value)
        tensor = self.graph.tensor[value]
        if maker is None:
            return np.full(len(choices), tensor.bytes)
        short_op = self._short_ops[self._rep(maker.name)]
        chosen = np.zeros(len(choices), np.int64)
        if (decision := self._node[maker.name]) is not None:
            node, twin, switch = decision
            chosen = choices[:, node]
            if switch >= 0:
                chosen = np.where(choices[:, switch] == 1, choices[:, twin], chosen)
        k = self.space.op_nodes[short_op.name].options[chosen]
        return self._tiles(short_op, maker.outputs.index(value), tensor.dtype)[k]

    def _tiles(self, short_op: Op, i: int, dtype: str) -> Ints:
        """Bytes of the largest tile of result `i` of an operator, per option: (K,)."""
        if (short_op.name, i) not in self._tile_bytes:
            model = self.space.model
            by_axis = digits(model.options(short_op).results[i], len(model.mesh.axes))
            atoms = model.analysis.atoms[short_op.outputs[i]]
            tiles = local_elements(by_axis, atoms, model.mesh) * ITEM_BYTES[dtype]
            self._tile_bytes[short_op.name, i] = tiles
        return self._tile_bytes[short_op.name, i]

    def _decision_nodes(self, name: str, node: int | None) -> tuple[int, int, int] | None:
        if node is None:
            return None
        both, segment = self.space.recompute_choice, self.space.segment_of.get(node)
        if segment is None:
            return self._whole(name, node), -1, -1
        twin, switch = both.twins[node], both.switches[segment]
        return self._whole(name, node), self._whole(name, twin), self._whole(name, switch)

    def _chosen(self, name: str, choice: Sequence[int]) -> tuple[int, int]:
        """The choice of `name`, and the switch that recomputes it, -1 if it is not recomputed."""
        if (decision := self._node[name]) is None:
            return 0, -1
        node, twin, switch = decision
        again = switch >= 0 and choice[switch] == 1
        return (choice[twin], switch) if again else (choice[node], -1)

    def _keeps(self, name: str, choice: Sequence[int]) -> bool:
        """Whether an operator runs once if its segment is recomputed."""
        return name in self._keep_node and choice[self._keep_node[name]] == 1

    def _rep(self, name: str) -> str:
        return self.short.stands_for.get(name, name)

    def _whole(self, name: str, node: int) -> int:
        """The node of `name` in whole assignments, given the `node` of its representative."""
        folded = self.space.folded
        number, copy = self._place(name) if folded.runs else (-1, 0)
        if number < 0:
            return node
        run, (rows, column) = folded.runs[number], self._run_nodes[number]
        if node == run.entry and copy > 0:
            return rows[copy - 1][column[run.exit]]
        return rows[copy][column[node]] if node in column else node

    def _place(self, name: str) -> tuple[int, int]:
        """The run to which an operator or parameter belongs and its copy there; -1 without one."""
        if name in self.short.copy_of:
            number, copy = self.short.copy_of[name]
            return number, copy + 1  # the second copy of the graph is the first of the run
        return self._second.get(name, (-1, 0))

    @cached_property
    def _run_nodes(self) -> list[tuple[list[list[int]], dict[int, int]]]:
        """For each run, its nodes in whole assignments by copy, and the column of each node."""
        folded = self.space.folded
        return [
            (folded.positions(number).tolist(), {node: i for i, node in enumerate(run.nodes)})
            for number, run in enumerate(folded.runs)
        ]

    @cached_property
    def _second(self) -> dict[str, tuple[int, int]]:
        """Operators and parameters of the second copy of each repeat, which starts its run."""
        graph = self.space.model.graph
        parameters = {leaf.name for leaf in self.space.parameters}
        found = {}
        for number, repeat in enumerate(self.short.repeats):
            span = repeat.copy(1)
            ops = [graph.ops[i] for i in span]
            inside = {op.name for op in ops}
            for op in ops:
                found[op.name] = number, 0
                for name in op.operands:
                    readers = graph.consumers[name]
                    if name in parameters and all(reader.name in inside for reader in readers):
                        found[name] = number, 0
        return found

    def peaks(self, points: list[Point]) -> list[Bytes]:
        """Peak memory per rank of each point: additive memory, fixed bytes, and `Peaks`."""
        if not points:
            return []
        transient = self.transients.of([point.choice for point in points])
        fixed = self._fixed_bytes
        return [
            Bytes(point.memory + fixed + extra)
            for point, extra in zip(points, transient, strict=True)
        ]

    def lasting_bytes(self, choice: tuple[int, ...]) -> Bytes:
        """Bytes of weights, gradients, optimizer state and batch, which exist together."""
        sizes = [each[self._chosen(name, choice)[0]] for name, each in self._stored_bytes]
        return Bytes(self._fixed_bytes + sum(sizes))

    def layouts(self, choice: tuple[int, ...]) -> dict[str, Layout]:
        """The layout of every parameter in a whole assignment."""
        return {one.name: one.layout for one in self._parameters(choice)}

    @cached_property
    def least_overhead(self) -> int:
        """Bytes that every plan needs beside its additive memory."""
        return self._fixed_bytes + self.transients.least

    def plan(
        self,
        point: Point,
        peak: Bytes,
        bound: float,
        name: str,
        notes: tuple[str, ...],
        *,
        staged: bool = False,
    ) -> Plan:
        """The plan of a point, with additive seconds and bytes until it is settled.

        Args:
            point: seconds, additive bytes and choices.
            peak: peak bytes per rank.
            bound: a lower bound of the seconds of all plans within that memory.
            name: the plan's name.
            notes: texts that the plan shows.
            staged: whether it has pipeline stages, each with its own copies of parameters.
        """
        model, machine = self.space.model, self.space.model.machine
        shares = machine.settles and model.measure.redistributes_once and not staged
        segments: dict[int, int] = {}  # switch -> number of the segment in the plan
        ops, transfers, saved = self._operators(point.choice, segments, shares=shares)
        swaps = zigzag_swaps(self.graph, self.short.stands_for, model, ops)
        stay = staying(segments, self._hosts, point.choice)
        offload = ("activations",) * (len(stay) < len(segments))
        again = {one.value for one in transfers if one.phase is Phase.RECOMPUTE}
        spec, parameters = optimizer_spec(self.optimizer), (*self._parameters(point.choice, again),)
        stored = sum(parameter.bytes for parameter in parameters)  # half of it gradients
        leaves = self.graph.leaves_of(LeafKind.INPUT)
        tensors = [(leaf.keys[0], self.graph.tensor[leaf.name]) for leaf in leaves]
        seconds = Seconds(point.time - saved + sum(swap.seconds for swap in swaps))
        experts = self._experts(ops)
        return Plan(
            fingerprint=self.graph.fingerprint,
            machine=machine.name,
            mesh=model.mesh,
            optimizer=placed(self.optimizer, ()),
            step_seconds=seconds,
            peak_bytes=peak,
            lower_bound_seconds=Seconds(min(bound, seconds)),
            inputs=tuple(InputSpec(key, t.shape, t.dtype, t.requires_grad) for key, t in tensors),
            constants=self.graph.constants,
            parameters=parameters,
            ops=tuple(ops),
            transfers=(*transfers, *swaps),
            name=name,
            notes=(*notes, self.graph.note) if self.graph.note else notes,
            remarks=self._remarks,
            numerics=self.graph.numerics,
            micro_batches=self.space.model.micro_batches,
            gradient_sync=self.space.model.gradient_sync,
            compiled=self.space.model.compiled,
            offload=(*offload, *spec.offload),
            on_device=tuple(stay) if offload else (),
            update_group_bytes=Bytes(host_group_bytes(stored // 2)) if spec.on_host else None,
            overlap=machine.overlap,
            gather_overlap=machine.gather_overlap,
            contention=machine.contention,
            expert_skew=experts.skew,
            host_devices=experts.host_devices,
            dtype=dtypes_of(self.graph)[0],
        )

    def _experts(self, ops: list[PlannedOp]) -> ExpertPlacement:
        """The placement of the experts of the mixtures among `ops`."""
        model = self.space.model
        every = ((model.graph.op[self._rep(op.name)], op) for op in ops)
        mixtures = [one for one in every if model.analysis.rules[one[0].name].routes]
        return expert_placement(model, mixtures)

    def _operators(
        self, choice: tuple[int, ...], segment_numbers: dict[int, int], *, shares: bool
    ) -> tuple[list[PlannedOp], list[PlannedTransfer], Seconds]:
        """Operators, transfers, and the seconds of transfers that the tables count in addition.

        With `shares`, operators that read a parameter in the same layout share one copy and one
        reduction of its gradient; in the tables every reader pays for its own. Adds the numbers of
        recomputed segments to `segment_numbers`, by their switches.
        """
        ops, transfers, saved = list[PlannedOp](), list[PlannedTransfer](), 0.0
        copies: set[tuple[str, tuple[int, int], int]] = set()
        layouts = {leaf: (code, regathered) for leaf, code, regathered, _ in self._stored(choice)}
        weights = frozenset(layouts)
        for call in self._steps.calls:
            chosen, switch = self._chosen(call.op.name, choice)
            new = len(segment_numbers) + 1
            segment = 0 if switch < 0 else segment_numbers.setdefault(switch, new)
            sources = tuple(layouts.get(value, ANYWHERE) for value in call.values)
            kept = switch >= 0 and self._keeps(call.op.name, choice)
            step = self._steps.of(call, call.options[chosen], Again(segment, kept), sources)
            layouts.update(step.layouts)
            ops.append(step.op)
            for value, wanted, moved in step.operand_transfers:
                again = any(t.phase is Phase.RECOMPUTE for t in moved)
                copy = value, wanted, segment if again else 0  # as `program/lower/rank_program.py`
                if shares and copy in copies:
                    saved += sum(charged_seconds(t, self.space.model.machine) for t in moved)
                    continue
                if value in weights:
                    copies.add(copy)
                transfers += moved
            transfers += step.transfers
        return ops, transfers, Seconds(saved)

    def _stored(self, choice: tuple[int, ...]) -> Iterator[tuple[str, int, bool, int]]:
        """For every parameter: name, layout code, whether it is regathered, its short index."""
        for name, number, codes, regathered in self._storage:
            k, _ = self._chosen(name, choice)
            yield name, codes[k], regathered[k], number

    @cached_property
    def _storage(self) -> list[tuple[str, int, list[int], list[bool]]]:
        """Every parameter: its index in the short graph, and its storage under each choice."""
        own = {leaf.name: i for i, leaf in enumerate(self.space.parameters)}
        found = []
        for leaf in self.graph.leaves_of(LeafKind.PARAMETER):
            number = own[self._rep(leaf.name)]
            stored = self.space.stored[number]
            found.append((leaf.name, number, stored.codes.tolist(), stored.regathered.tolist()))
        return found

    @cached_property
    def _stored_bytes(self) -> list[tuple[str, list[int]]]:
        """Every parameter and its lasting bytes under each choice."""
        model, ways = self.space.model, zip(self.space.parameters, self.space.stored, strict=True)
        sizes = [model.parameter(leaf, stored.codes)[1].tolist() for leaf, stored in ways]
        return [(name, sizes[number]) for name, number, _, _ in self._storage]

    def _parameters(
        self, choice: tuple[int, ...], again: Collection[str] = ()
    ) -> Iterator[PlannedParameter]:
        for name, code, _, number in self._stored(choice):
            key = name, code, name in again
            if key not in self._kept:
                self._kept[key] = self._parameter(*key, number)
            yield self._kept[key]

    def _parameter(self, name: str, code: int, regathered: bool, number: int) -> PlannedParameter:
        model, leaf = self.space.model, self.space.parameters[number]
        only = np.array([code], np.int64)
        size = Bytes(int(model.parameter(leaf, only)[1][0]))
        update = Seconds(float(model.seconds_on_device(leaf, only)[0]))
        return PlannedParameter(name, model.layout(leaf.name, code), size, update, regathered)
