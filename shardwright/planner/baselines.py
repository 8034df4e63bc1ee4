"""Baseline plans as tilings: data parallel, fully sharded, Megatron-style.

They are priced by the same model, shown beside the frontier, and part of it:
the chosen plan is never worse than the best of them.

Sources: ZeRO (arXiv 1910.02054) and FSDP shard parameters and gather them for
use. ZeRO-3, and FSDP by default, gather them again in the backward pass; ZeRO-2
keeps the gathered weights. (ZeRO-1 would be ZeRO-2 with more memory: within one
step they differ only in the layout of gradients.) Megatron-LM (arXiv
1909.08053) splits attention heads and the inner dimension of the MLP, so that
column- and row-parallel layers alternate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, final

from shardwright.ir.graph import Leaf
from shardwright.ir.layout import Layout
from shardwright.ir.options.constraints import Constraint
from shardwright.planner.permitted import broken
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.space.assembly import Storage
from shardwright.planner.space.constrain import NO_MARKS, Marks
from shardwright.planner.space.space import Space
from shardwright.planner.strategies.dimensions import batch_atoms, inner_atoms, sequence_atoms
from shardwright.planner.strategies.splits import (
    UNSPLIT,
    first_natural,
    first_shard,
    most_split,
    sharded_over,
    split_choice,
    with_other_dimensions,
)
from shardwright.planner.tables.layout_codes import encode
from shardwright.planner.tables.options import Options
from shardwright.rules.rule import Rule
from shardwright.solve.elimination.problem import Assignment

AxisRole = Literal["data", "tensor", "sequence"]
Stored = Literal["replicated", "kept", "regathered"]

_RECIPES: tuple[tuple[str, tuple[AxisRole, ...], Stored], ...] = (
    ("data parallel", ("data",), "replicated"),
    ("ZeRO-2", ("data",), "kept"),
    ("fully sharded", ("data",), "regathered"),
    ("tensor parallel", ("tensor",), "replicated"),
    ("sequence and tensor parallel", ("sequence",), "replicated"),
    ("data x tensor parallel", ("data", "tensor"), "replicated"),
    ("fully sharded x tensor parallel", ("data", "tensor"), "regathered"),
    ("data x sequence and tensor parallel", ("data", "sequence"), "replicated"),
    ("fully sharded x sequence and tensor parallel", ("data", "sequence"), "regathered"),
)


def baselines(space: Space) -> Iterator[tuple[str, Assignment]]:
    """Names and assignments of the space's `problem`, for all recipes that fit its mesh."""
    builder, axes = _BaselineBuilder(space), len(space.model.mesh.axes)
    if space.model.mesh.size == 1:
        everywhere: tuple[AxisRole, ...] = tuple("data" for _ in range(axes))
        yield "one device", builder.write(everywhere, "replicated")
        return
    for name, roles, stored in _RECIPES:
        possible = (builder.inner or roles == ("data",)) and (
            builder.sequence or "sequence" not in roles
        )
        if len(roles) == axes and possible:
            yield name, builder.write(roles, stored)


@final
class _BaselineBuilder:
    """Turns roles of axes into choices of the operators and parameters of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        graph, analysis = space.model.graph, space.model.analysis
        batch = batch_atoms(graph, analysis)
        self.inner = inner_atoms(graph, analysis, batch, space.model.mesh.shape[-1])
        self.sequence = sequence_atoms(graph, analysis)
        self._splits: dict[AxisRole, tuple[frozenset[int], ...]] = {
            "data": (batch,),
            "tensor": (self.inner,),
            # Operators without an inner atom are split along the sequence.
            "sequence": (self.inner, self.sequence),
        }
        self._numbers: dict[AxisRole, list[int]] = {}
        self._feasible: dict[tuple[int, tuple[int, ...]], int] = {}
        self._stored: dict[object, int] = {}

    def write(self, roles: tuple[AxisRole, ...], stored: Stored) -> Assignment:
        """The assignment that gives every axis its role."""
        model = self.space.model
        wanted = [self._choices(role) for role in roles]
        options = {
            op.name: self._option(model.options(op), tuple([along[i] for along in wanted]))
            for i, op in enumerate(model.graph.ops)
        }
        storage = {
            leaf.name: self._storage(leaf, choices, roles, stored)
            for leaf, choices in zip(self.space.parameters, self.space.stored, strict=True)
        }
        return self.space.assignment(options, storage)

    def _choices(self, role: AxisRole) -> list[int]:
        """The choice of every operator along an axis, as indices into `Rule.choices()`."""
        if role not in self._numbers:
            model, preferred = self.space.model, self._splits[role]
            rules = (model.analysis.rules[op.name] for op in model.graph.ops)
            self._numbers[role] = [_choice(rule, preferred) for rule in rules]
        return self._numbers[role]

    def _option(self, options: Options, wanted: tuple[int, ...]) -> int:
        """The index of `wanted`, without its innermost splits as far as they are infeasible."""
        key = id(options), wanted
        if key not in self._feasible:
            self._feasible[key] = options.choices.index(most_split(options.choices, wanted))
        return self._feasible[key]

    def _storage(
        self, leaf: Leaf, choices: Storage, roles: tuple[AxisRole, ...], stored: Stored
    ) -> int:
        """The choice of a parameter's storage."""
        analysis, mesh = self.space.model.analysis, self.space.model.mesh
        atoms = analysis.atoms[leaf.name]
        tensor = first_shard(analysis.dims[leaf.name], self.inner)
        key = atoms, tensor, id(choices), roles, stored
        if key not in self._stored:
            layout = Layout.replicated(mesh)
            for axis, role in enumerate(roles):
                if role != "data" and tensor is not None:
                    shards = with_other_dimensions(tensor, atoms)
                    layout, _ = first_natural(atoms, layout, axis, shards)
            if stored != "replicated":
                split = {tensor.dim} if tensor is not None and set(roles) != {"data"} else set()
                data = (axis for axis, role in enumerate(roles) if role == "data")
                layout = sharded_over(atoms, layout, data, split)
            again = stored == "regathered"
            self._stored[key] = choices.find(encode(layout, atoms), regathered=again)
        return self._stored[key]


def _choice(rule: Rule, preferred: Sequence[frozenset[int]]) -> int:
    """The index of the first split along the most preferred atoms; 0 if there is none."""
    return next((number for atoms in preferred if (number := split_choice(rule, atoms))), UNSPLIT)


def baseline_candidates(
    writer: PlanBuilder, wanted: Sequence[Constraint] = (), marks: Marks = NO_MARKS
) -> Iterator[Candidate]:
    """The baselines of the writer's space, with the constraints that they break."""
    space = writer.space
    named = list(baselines(space))
    points = [space.prices.point(space.folded.expand(assignment)) for _, assignment in named]
    for (name, assignment), point, peak in zip(named, points, writer.peaks(points), strict=True):
        broke: tuple[Constraint, ...] = ()
        if wanted:
            tilings, storage = space.tilings(assignment), space.storage(assignment)
            like = writer.short.stands_for
            broke = broken(wanted, marks, like, space.model, tilings, storage)
        yield Candidate(point, peak, writer, name, (), broke)
