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

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, final

from shardwright.ir.graph import Leaf, LeafKind
from shardwright.ir.layout import REPLICATE, Atoms, Layout, Mesh, Shard, is_natural, shape_of
from shardwright.planner.space.assembly import Storage
from shardwright.planner.space.space import Space
from shardwright.planner.tables.layout_codes import encode
from shardwright.planner.tables.options import Options
from shardwright.rules.rule import FactorKind, Rule
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


def batch_atoms(space: Space) -> frozenset[int]:
    """Atoms of the batch: the leading dimension of every input."""
    dims = space.model.analysis.dims
    leaves = space.model.graph.leaves_of(LeafKind.INPUT)
    leading = (dims[leaf.name][0] for leaf in leaves if dims[leaf.name])
    return frozenset(atoms[0] for atoms in leading if atoms)


def sequence_atoms(space: Space) -> frozenset[int]:
    """Atoms of the second dimension of inputs of tokens: the sequence."""
    dims, tensor = space.model.analysis.dims, space.model.graph.tensor
    leaves = space.model.graph.leaves_of(LeafKind.INPUT)
    tokens = (leaf for leaf in leaves if "int" in tensor[leaf.name].dtype)
    second = (dims[leaf.name][1] for leaf in tokens if len(dims[leaf.name]) == 2)
    return frozenset(atoms[0] for atoms in second if atoms)


def inner_atoms(space: Space) -> frozenset[int]:
    """Atoms that Megatron splits: for each weight the first one that every operator can split.

    The residual stream (the atom that most weights have) and the batch are not
    split. One atom is chosen for each weight that has no chosen atom yet.
    """
    analysis, mesh = space.model.analysis, space.model.mesh
    parts = mesh.shape[-1]
    weights = [leaf for leaf in space.parameters if len(analysis.atoms[leaf.name]) > 1]
    counts = Counter(
        atom for leaf in weights for atom in {a for dim in analysis.dims[leaf.name] for a in dim}
    )
    stream = {atom for atom, count in counts.most_common(1) if count > 2}
    whole = {
        factor.atom
        for rule in analysis.rules.values()
        for factor in rule.factors
        if factor.kind is FactorKind.WHOLE
    }
    forbidden = whole | stream | batch_atoms(space)
    chosen: set[int] = set()
    for leaf in weights:
        pairs = [
            (atom, size)
            for dim, sizes in zip(analysis.dims[leaf.name], analysis.atoms[leaf.name], strict=True)
            for atom, size in zip(dim, sizes, strict=True)
        ]
        if any(atom in chosen for atom, _ in pairs):
            continue
        free = [atom for atom, size in pairs if atom not in forbidden and size % parts == 0]
        chosen.update(free[:1])
    return frozenset(chosen)


@final
class _BaselineBuilder:
    """Turns roles of axes into choices of the operators and parameters of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.inner = inner_atoms(space)
        self.sequence = sequence_atoms(space)
        self._splits: dict[AxisRole, tuple[frozenset[int], ...]] = {
            "data": (batch_atoms(space),),
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
            self._feasible[key] = _largest_feasible(options, wanted)
        return self._feasible[key]

    def _storage(
        self, leaf: Leaf, choices: Storage, roles: tuple[AxisRole, ...], stored: Stored
    ) -> int:
        """The choice of a parameter's storage."""
        analysis, mesh = self.space.model.analysis, self.space.model.mesh
        atoms = analysis.atoms[leaf.name]
        tensor = _shard(analysis.dims[leaf.name], self.inner)
        key = atoms, tensor, id(choices), roles, stored
        if key not in self._stored:
            layout = _sharded(atoms, tensor, roles, mesh)
            if stored != "replicated":
                layout = _also_sharded(atoms, layout, roles, tensor)
            again = stored == "regathered"
            self._stored[key] = choices.find(encode(layout, atoms), regathered=again)
        return self._stored[key]


def _largest_feasible(options: Options, wanted: tuple[int, ...]) -> int:
    for keep in range(len(wanted), -1, -1):
        tried = (*wanted[:keep], *(0,) * (len(wanted) - keep))
        if tried in options.choices:
            return options.choices.index(tried)
    raise AssertionError("the replicated tiling is always feasible")


def _choice(rule: Rule, preferred: Sequence[frozenset[int]]) -> int:
    """The index of the first split along the most preferred atoms; 0 if there is none."""
    splits = [factor for factor in rule.factors if factor.kind is FactorKind.PARALLEL]
    for atoms in preferred:
        for number, factor in enumerate(splits, 1):  # choices begin with none, then come splits
            if factor.atom in atoms:
                return number
    return 0


def _shard(dims: tuple[tuple[int, ...], ...], wanted: frozenset[int]) -> Shard | None:
    """A shard of the first atom of a tensor that is one of `wanted`; None if there is none."""
    for d, ids in enumerate(dims):
        for a, atom in enumerate(ids):
            if atom in wanted:
                return Shard(d, a)
    return None


def _sharded(atoms: Atoms, tensor: Shard | None, roles: tuple[AxisRole, ...], mesh: Mesh) -> Layout:
    """The stored layout along all but the data axes: that of the computation, if it is natural.

    If it is not (a fused projection split by heads), the parameter is sharded along its largest
    other dimension and redistributed. Vectors and other parameters are replicated.
    """
    sizes = shape_of(atoms)
    others = sorted(range(len(sizes)), key=lambda d: (-sizes[d], d))
    tried = [] if tensor is None else [tensor, *(Shard(d) for d in others if d != tensor.dim)]
    for shard in tried:
        layout = Layout(mesh, tuple(REPLICATE if role == "data" else shard for role in roles))
        if is_natural(atoms, layout):
            return layout
    return Layout.replicated(mesh)


def _also_sharded(
    atoms: Atoms, layout: Layout, roles: tuple[AxisRole, ...], tensor: Shard | None
) -> Layout:
    """`layout`, sharded along the data axes by the largest atom that allows it.

    Where an axis splits the dimension of `tensor`, another dimension comes first: a tile of both
    would be gathered and split again.
    """
    split = tensor.dim if tensor is not None and set(roles) != {"data"} else -1
    order = sorted(
        ((size, d, a) for d, sizes in enumerate(atoms) for a, size in enumerate(sizes)),
        key=lambda atom: (atom[1] == split, -atom[0], atom[1], atom[2]),
    )
    for axis, role in enumerate(roles):
        if role != "data":
            continue
        for _, d, a in order:
            placements = list(layout.placements)
            placements[axis] = Shard(d, a)
            tried = Layout(layout.mesh, tuple(placements))
            if is_natural(atoms, tried):
                layout = tried
                break
    return layout
