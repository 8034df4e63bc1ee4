"""Applies the user's constraints to a graph: restricts the choices of operators and parameters.

A pin restricts only the operators that have the dimension it names: in an attention module,
`tp:heads` restricts the operators with heads and leaves the others free. Excluded choices are not
in the space, so the space is smaller and the lower bound holds under the constraints. Operators
that depend only on constants are computed whole on every device and are not restricted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import final

from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.ir.layout import Mesh, Placement, Shard
from shardwright.ir.options.constraints import (
    EVERY_AXIS,
    Along,
    Cap,
    Constraint,
    ConstraintError,
    Forbid,
    OnMesh,
    Pin,
    matches,
)
from shardwright.ir.pipeline import stage_mesh
from shardwright.machine.model import Machine
from shardwright.planner.axes.axis_roles import ROLES, suitable
from shardwright.planner.communication.prices import Routes
from shardwright.planner.space.clusters import constant_values
from shardwright.planner.strategies.dimensions import ModelDimensions
from shardwright.planner.tables.layout_codes import digit
from shardwright.planner.tables.memory import BucketSizes
from shardwright.planner.tables.mesh_invariants import MeshInvariants
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.objective import Duration
from shardwright.planner.tables.options import Allowed, Only
from shardwright.planner.tables.pricing import Pricing
from shardwright.rules.analysis import Analysis
from shardwright.rules.naming import dimension_names, split_words
from shardwright.rules.rule import Choice, PassPartial, Route, Rule, Split

_SHOWN = 12  # the most words in a message
_WHOLE = 0  # the choice without a split, and the digit of Replicate


@dataclass(frozen=True)
class Marks:
    """Maps operators and parameters of a graph, by name, to the `statements` that match them.

    On `meshes`, those that constraints name, an axis named by a role may only be used in that role;
    with `caps_roles` (a constraint caps the size of a role) this holds on all meshes.
    """

    statements: tuple[tuple[Pin | Forbid, Along], ...]
    of: Mapping[str, tuple[int, ...]]
    meshes: frozenset[Mesh] = frozenset()
    caps_roles: bool = False

    def binds_roles(self, mesh: Mesh) -> bool:
        """Whether the axis names of `mesh`, perhaps of a pipeline group, restrict operators."""
        named = self.caps_roles or mesh in {*self.meshes, *map(stage_mesh, self.meshes)}
        return mesh.size > 1 and named and any(name in ROLES for name in mesh.names)

    @classmethod
    def on(cls, graph: Graph, constraints: Sequence[Constraint]) -> Marks:
        """Match every glob; raises `ConstraintError` if one matches nothing."""
        constant = constant_values(graph)
        modules: dict[str, list[str]] = {}
        for op in graph.ops:
            if not constant.issuperset(op.outputs):
                modules.setdefault(op.source.module, []).append(op.name)
        parameters = {leaf.name: leaf.keys for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        statements: list[tuple[Pin | Forbid, Along]] = []
        of: dict[str, list[int]] = {}
        for constraint in constraints:
            if not isinstance(constraint, Pin | Forbid):
                continue
            for along in constraint.along:
                if along.placements:
                    known = [key for keys in parameters.values() for key in keys]
                    found = [
                        name
                        for name, keys in parameters.items()
                        if any(matches(constraint.glob, key) for key in keys)
                    ]
                else:
                    known = list(modules)
                    hit = [path for path in modules if matches(constraint.glob, path)]
                    found = [name for path in hit for name in modules[path]]
                if not found:
                    what = "parameter" if along.placements else "module"
                    raise ConstraintError(_no_match(constraint, what, known))
                for name in found:
                    of.setdefault(name, []).append(len(statements))
                statements.append((constraint, along))
        meshes = frozenset(c.mesh for c in constraints if isinstance(c, OnMesh))
        caps = any(isinstance(c, Cap) and c.axis in ROLES for c in constraints)
        numbers = {name: tuple(numbers) for name, numbers in of.items()}
        return cls(tuple(statements), numbers, meshes, caps)


NO_MARKS = Marks((), {})


@final
class Limits:
    """The choices that the constraints in `marks` permit in an analysed graph, for any mesh.

    Raises:
        ConstraintError: none of the matched operators has the named dimension, or none of the
            matched parameters can have the placement.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        marks: Marks,
        routes: Routes | None = None,
        other: Limits | None = None,
    ) -> None:
        """`other` are the limits of another form of the graph, which shares cost tables."""
        self._graph = graph
        self._analysis = analysis
        self._marks = marks
        self._routes = routes
        self._other = other
        self._meshless: dict[bool, MeshInvariants] = {}  # of the machine of the last call
        self._models: dict[Hashable, CostModel] = {}  # the first of each kind, by what decides it
        self._hits: dict[tuple[str, int], frozenset[int]] = {}
        self._marked = [op for op in graph.ops if op.name in marks.of]
        for op in self._marked:
            rule = analysis.rules[op.name]
            for number in marks.of[op.name]:
                self._hits[op.name, number] = hits(marks.statements[number][1], rule, self._names)
        for number, (constraint, along) in enumerate(marks.statements):
            if along.placements:
                self._check_placements(number, constraint, along)
            else:
                self._check_words(number, constraint, along)

    @cached_property
    def _names(self) -> dict[int, str]:
        return dimension_names(self._graph, self._analysis)

    def allowed(self, mesh: Mesh) -> Allowed:
        """The choices that are left on `mesh`; raises `ConstraintError` where none is left."""
        if mesh.size == 1:
            return Allowed()  # nothing is split on one device
        bound = self._marks.binds_roles(mesh)
        operators = {op.name: self._of_role(op, mesh) for op in self._graph.ops} if bound else {}
        operators |= {op.name: self._operator(op, mesh, operators) for op in self._marked}
        leaves = self._graph.leaves_of(LeafKind.PARAMETER)
        parameters = {
            leaf.name: self._parameter(leaf.name, mesh)
            for leaf in leaves
            if leaf.name in self._marks.of or bound
        }
        return Allowed(operators, parameters)

    def _of_role(self, op: Op, mesh: Mesh) -> Only:
        """The choices of an operator that suit the roles of the axes."""
        rule = self._analysis.rules[op.name]
        return tuple(suitable(op, rule, name, self._dimensions) for name in mesh.names)

    @cached_property
    def _dimensions(self) -> ModelDimensions:
        return ModelDimensions.of(self._graph, self._analysis)

    def model(
        self,
        machine: Machine,
        mesh: Mesh,
        optimizer: str,
        micro_batches: int = 1,
        buckets: BucketSizes | None = None,
        gradient_sync: str | None = None,
        *,
        compiled: bool = False,
    ) -> CostModel:
        """The cost model of the choices that are left.

        With `micro_batches` the graph must be that of one. `gradient_sync` is as in `Plan`.

        Raises:
            ConstraintError: an operator or parameter has no choice.
        """
        known = self._meshless.get(compiled)
        if known is None or not known.holds_on(machine):
            same = None if self._other is None else self._other._meshless.get(compiled)
            if same is not None and not same.holds_on(machine):
                same = None
            one = self._graph, self._analysis, machine
            known = MeshInvariants(*one, compiled=compiled, micro_batches=micro_batches, like=same)
            self._meshless[compiled] = known
        step = optimizer, micro_batches, buckets, gradient_sync, compiled
        key = id(known.forms), id(machine), mesh.shape, mesh.pipeline, step
        like = self._models.get(key)  # alive, and so are its machine and `known`
        if like is None and self._other is not None:
            like = self._other._models.get(key)
        measure = Duration(machine, mesh, self._routes) if like is None else like.measure
        pricing = Pricing(optimizer, measure, micro_batches, buckets, gradient_sync, compiled)
        model = CostModel(
            self._graph,
            self._analysis,
            machine,
            mesh,
            pricing,
            self.allowed(mesh),
            meshless=known,
            like=like,
        )
        self._models.setdefault(key, model)
        self._check_sizes(model)
        return model

    def _check_sizes(self, model: CostModel) -> None:
        """Raise `ConstraintError` if a marked operator or parameter has no choice on the mesh."""
        for op in self._marked:
            if not len(model.options(op)):
                rule = self._analysis.rules[op.name]
                splits = split_words(rule, rule.choices(), self._names)
                sizes = {
                    f"{word} {rule.factor[rule.cuts(choice)[0]].size}"
                    for choice, word in zip(rule.choices(), splits, strict=True)
                    if isinstance(choice, Split)
                }
                raise ConstraintError(
                    f"{self._quoted(op.name)}: on mesh {model.mesh} {_where(op)} would leave a"
                    f" device without a part; its sizes are {', '.join(sorted(sizes))}"
                )
        for leaf in self._graph.leaves_of(LeafKind.PARAMETER):
            if leaf.name in self._marks.of and not len(model.storable(leaf)):
                shape = list(self._graph.tensor[leaf.name].shape)
                raise ConstraintError(
                    f"{self._quoted(leaf.name)}: on mesh {model.mesh} {leaf.name} of shape {shape}"
                    " cannot be stored so; parameters are sharded evenly along their own"
                    " dimensions, and every device holds a part"
                )

    def _operator(self, op: Op, mesh: Mesh, of_roles: Mapping[str, Only]) -> Only:
        """The choices of a marked operator; a pin along an axis overrides the axis' role."""
        choices = len(self._analysis.rules[op.name].choices())
        left = [set(range(choices)) for _ in mesh.axes]
        pinned: set[str] = set()
        for number in self._marks.of[op.name]:
            if found := self._hits[op.name, number]:
                constraint, along = self._marks.statements[number]
                self._restrict(left, number, found, mesh)
                pinned |= {along.axis} if isinstance(constraint, Pin) else set()
        for axis, suits in enumerate(of_roles.get(op.name, ())):
            if not pinned & {mesh.names[axis], EVERY_AXIS}:
                left[axis] &= suits
        return self._left(left, op.name, _where(op), mesh)

    def _parameter(self, name: str, mesh: Mesh) -> Only:
        counts = [len(sizes) for sizes in self._analysis.atoms[name]]
        left = [set(range(2 + sum(counts))) for _ in mesh.axes]
        for axis, role in enumerate(mesh.names if self._marks.binds_roles(mesh) else ()):
            left[axis] = {_WHOLE} if role == "dp_replicate" else left[axis]
        for number in self._marks.of.get(name, ()):
            placements = self._marks.statements[number][1].placements
            known = [p for p in placements if exists(p, counts)]
            if found := frozenset(digit(p, counts) for p in known):
                self._restrict(left, number, found, mesh)
        return self._left(left, name, name, mesh)

    def _restrict(
        self, left: list[set[int]], number: int, found: frozenset[int], mesh: Mesh
    ) -> None:
        """Apply a statement to `left` along its axes: keep or remove the choices `found`."""
        constraint, along = self._marks.statements[number]
        axes = [
            i
            for i, (name, size) in enumerate(mesh.axes)
            if size > 1 and along.axis in (name, EVERY_AXIS)
        ]
        if isinstance(constraint, Pin) and not axes and _WHOLE not in found:
            raise ConstraintError(f"{constraint}: mesh {mesh} has no axis {along.axis} to split by")
        for axis in axes:
            left[axis] = left[axis] & found if isinstance(constraint, Pin) else left[axis] - found

    def _left(self, left: list[set[int]], name: str, what: str, mesh: Mesh) -> Only:
        for (axis, size), choices in zip(mesh.axes, left, strict=True):
            if size > 1 and not choices:
                raise ConstraintError(
                    f"{self._quoted(name)}: together they leave {what} nothing to do along {axis}"
                )
        return tuple(frozenset(choices) for choices in left)

    def _quoted(self, name: str) -> str:
        numbers = self._marks.of[name]
        said = dict.fromkeys(str(self._marks.statements[number][0]) for number in numbers)
        return "; ".join(said)

    def _check_placements(self, number: int, constraint: Pin | Forbid, along: Along) -> None:
        leaves = self._graph.leaves_of(LeafKind.PARAMETER)
        meant = [leaf.name for leaf in leaves if number in self._marks.of.get(leaf.name, ())]
        counts = [[len(sizes) for sizes in self._analysis.atoms[name]] for name in meant]
        for placement in along.placements:
            if not any(exists(placement, one) for one in counts):
                most = max(map(len, counts)) - 1
                raise ConstraintError(
                    f"{constraint}: no parameter that {constraint.glob} matches can be stored as"
                    f" {placement}; their last dimension is {most}, counted from 0"
                )

    def _check_words(self, number: int, constraint: Pin | Forbid, along: Along) -> None:
        meant = [op for op in self._marked if number in self._marks.of[op.name]]
        rules = [self._analysis.rules[op.name] for op in meant]
        for word in along.words:
            one = Along(along.axis, (word,))
            if not any(hits(one, rule, self._names) for rule in rules):
                known = dict.fromkeys(w for rule in rules for w in _words(rule, self._names))
                shown = list(known)[:_SHOWN]
                raise ConstraintError(
                    f"{constraint}: nothing in {constraint.glob} can do {word!r}; the words there"
                    f" are {', '.join(shown)}{', …' * (len(known) > _SHOWN)}"
                )


def hits(along: Along, rule: Rule, names: Mapping[int, str]) -> frozenset[int]:
    """Indices into `rule.choices()` of the choices that `along` names."""
    return frozenset(
        number
        for number, choice in enumerate(rule.choices())
        if any(_means(word, choice, rule, names) for word in along.words)
    )


def exists(placement: Placement, atoms_per_dim: Sequence[int]) -> bool:
    """Whether a tensor with so many atoms per dimension can have `placement` along an axis.

    >>> exists(Shard(1, 2), (1, 3)), exists(Shard(2), (1, 3))
    (True, False)
    """
    if not isinstance(placement, Shard):
        return True
    at = placement.dim
    return at < len(atoms_per_dim) and placement.atom < atoms_per_dim[at]


def _means(word: str, choice: Choice, rule: Rule, names: Mapping[int, str]) -> bool:
    if choice is None:
        return word in ("whole", "-")
    if isinstance(choice, PassPartial):
        return word in ("partial sums", str(choice))
    (said,) = split_words(rule, (choice,), dict(names))
    if isinstance(choice, Route):  # it splits rows or owners
        splits = (Split(factor) for factor in rule.cuts(choice))
        either = any(_means(word, split, rule, names) for split in splits)
        return word in (said, str(choice)) or either
    base = rule.cuts(choice)[0].split(".")[0]
    return word in (said, said.partition(" (")[0], str(choice), base)


def _words(rule: Rule, names: Mapping[int, str]) -> Iterator[str]:
    words = split_words(rule, rule.choices(), dict(names))
    yield from ("whole" if word == "-" else word for word in words)


def _where(op: Op) -> str:
    return f"{op.kind} of {op.source.module}" if op.source.module else op.kind


def _no_match(constraint: Pin | Forbid, what: str, known: Iterable[str]) -> str:
    paths = [path for path in dict.fromkeys(known) if path]
    glob = constraint.glob
    wider = f"*{glob}" if any(matches(f"*{glob}", path) for path in paths) else ""
    close = get_close_matches(glob, paths, 3, 0.3) or paths[:3]
    hint = f"did you mean {wider}" if wider else f"there are {', '.join(close)}, …"
    if not paths:
        hint = "use * for all"
    return f"{constraint}: no {what} matches {glob!r}; {hint}"
