"""The well-known plans, written as tilings: data parallel, fully sharded, Megatron-style.

They are costed by the same model, shown beside the frontier, and part of it:
the chosen plan is never worse than the best of them.

Sources: ZeRO (arXiv 1910.02054) and FSDP shard what is stored and gather it for
use. Stage 3, and FSDP as it comes, gather once more in the backward pass; stage
2 keeps the gathered weights. (Stage 1 would be stage 2 with more memory: within
one step only where gradients lie tells them apart.) Megatron-LM (arXiv
1909.08053) splits attention heads and the inner dimension of the MLP, so that
column- and row-parallel layers alternate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from shardwright.cost.codes import encode
from shardwright.cost.options import Options
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import REPLICATE, Atoms, Layout, Placement, Shard, fits
from shardwright.rules.rule import Choice, FactorKind, Rule, Split, Tiling
from shardwright.search.problem import Assignment
from shardwright.search.space import Space

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
    """Names and assignments, of the space's `problem`, that this mesh has a place for."""
    inner, axes = inner_atoms(space), len(space.model.mesh.axes)
    if space.model.mesh.size == 1:
        everywhere: tuple[AxisRole, ...] = tuple("data" for _ in range(axes))
        yield "one device", _write(space, inner, everywhere, "replicated")
        return
    sequence = bool(sequence_atoms(space))
    for name, roles, stored in _RECIPES:
        possible = (inner or roles == ("data",)) and (sequence or "sequence" not in roles)
        if len(roles) == axes and possible:
            yield name, _write(space, inner, roles, stored)


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
    """Atoms that Megatron splits: of a weight's dimension, the first that every operator can split.

    The residual stream (the atom that most weights have) and the batch stay
    whole. One atom is chosen for each weight that has none yet.
    """
    analysis, mesh = space.model.analysis, space.model.mesh
    ways = mesh.shape[-1]
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
        free = [atom for atom, size in pairs if atom not in forbidden and size % ways == 0]
        chosen.update(free[:1])
    return frozenset(chosen)


def _write(
    space: Space, inner: frozenset[int], roles: tuple[AxisRole, ...], stored: Stored
) -> Assignment:
    model = space.model
    split = {
        "data": (batch_atoms(space),),
        "tensor": (inner,),
        "sequence": (
            inner,
            sequence_atoms(space),
        ),  # what is not split inside is along the sequence
    }
    options = {}
    for op in model.graph.ops:
        rule = model.analysis.rules[op.name]
        wanted = tuple(_choice(rule, split[role]) for role in roles)
        options[op.name] = _largest_feasible(rule, wanted, model.options(op))
    storage = {}
    for leaf, choices in zip(space.parameters, space.stored, strict=True):
        atoms, dims = model.analysis.atoms[leaf.name], model.analysis.dims[leaf.name]
        placements: list[Placement] = []
        for role in roles:
            tensor = _shard(atoms, dims, lambda atom: atom in inner)
            placements.append(tensor if role != "data" and tensor else REPLICATE)
        layout = Layout(model.mesh, tuple(placements))
        if not fits(atoms, layout):
            layout = Layout.replicated(model.mesh)
        if stored != "replicated":
            layout = _also_sharded(atoms, layout, roles)
        again = stored == "regathered"
        storage[leaf.name] = choices.find(encode(layout, atoms), regathered=again)
    return space.assignment(options, storage)


def _choice(rule: Rule, preferred: Sequence[frozenset[int]]) -> Choice:
    for atoms in preferred:
        for factor in rule.factors:
            if factor.atom in atoms and factor.kind is FactorKind.PARALLEL:
                return Split(factor.name)
    return None


def _largest_feasible(rule: Rule, wanted: Tiling, options: Options) -> int:
    """The number of `wanted`, or with the innermost splits given up until it is feasible."""
    for keep in range(len(wanted), -1, -1):
        try:
            return options.find(rule, (*wanted[:keep], *(None,) * (len(wanted) - keep)))
        except ValueError:
            continue
    raise AssertionError("the replicated tiling is always feasible")


def _shard(
    atoms: Atoms, dims: tuple[tuple[int, ...], ...], good: Callable[[int], bool]
) -> Shard | None:
    for d, ids in enumerate(dims):
        for a, atom in enumerate(ids):
            if good(atom):
                return Shard(d, a)
    return None


def _also_sharded(atoms: Atoms, layout: Layout, roles: tuple[AxisRole, ...]) -> Layout:
    """`layout` with the data axes sharding the biggest atom that can be."""
    order = sorted(
        ((size, d, a) for d, sizes in enumerate(atoms) for a, size in enumerate(sizes)),
        key=lambda atom: (-atom[0], atom[1], atom[2]),
    )
    for axis, role in enumerate(roles):
        if role != "data":
            continue
        for _, d, a in order:
            placements = list(layout.placements)
            placements[axis] = Shard(d, a)
            tried = Layout(layout.mesh, tuple(placements))
            if fits(atoms, tried):
                layout = tried
                break
    return layout
