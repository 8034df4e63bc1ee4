"""The well-known plans, written as tilings: data parallel, fully sharded, Megatron-style.

They are costed by the same model, shown beside the frontier, and part of it:
the chosen plan is never worse than the best of them.

Sources: ZeRO stage 3 (arXiv 1910.02054) and FSDP shard what is stored and
gather it for use; Megatron-LM (arXiv 1909.08053) splits attention heads and
the inner dimension of the MLP, so that column- and row-parallel layers
alternate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from shardwright.cost.codes import encode
from shardwright.cost.options import Options
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import REPLICATE, Atoms, Layout, Placement, Shard, fits
from shardwright.rules.rule import Choice, FactorKind, Rule, Split, Tiling
from shardwright.search.problem import Assignment
from shardwright.search.space import Space

AxisRole = str  # "data", "tensor" or "sequence"


def baselines(space: Space) -> Iterator[tuple[str, Assignment]]:
    """Names and assignments, of the space's `problem`, that this mesh has a place for."""
    axes = len(space.model.mesh.axes)
    inner = inner_atoms(space)
    if space.model.mesh.size == 1:
        yield "one device", _write(space, inner, ("data",) * axes, sharded=False)
        return
    if axes == 1:
        yield "data parallel", _write(space, inner, ("data",), sharded=False)
        yield "fully sharded", _write(space, inner, ("data",), sharded=True)
        if inner:
            yield "tensor parallel", _write(space, inner, ("tensor",), sharded=False)
            if sequence_atoms(space):
                yield (
                    "sequence and tensor parallel",
                    _write(space, inner, ("sequence",), sharded=False),
                )
    elif axes == 2 and inner:
        yield "data x tensor parallel", _write(space, inner, ("data", "tensor"), sharded=False)
        yield (
            "fully sharded x tensor parallel",
            _write(space, inner, ("data", "tensor"), sharded=True),
        )
        if sequence_atoms(space):
            roles = ("data", "sequence")
            yield "data x sequence and tensor parallel", _write(space, inner, roles, sharded=False)
            name = "fully sharded x sequence and tensor parallel"
            yield name, _write(space, inner, roles, sharded=True)


def batch_atoms(space: Space) -> frozenset[int]:
    """Atoms of the batch: the leading dimension of every input."""
    dims = space.model.analysis.dims
    leaves = space.model.graph.leaves_of(LeafKind.INPUT)
    leading = (dims[leaf.name][0] for leaf in leaves if dims[leaf.name])
    return frozenset(atoms[0] for atoms in leading if atoms)


def sequence_atoms(space: Space) -> frozenset[int]:
    """Atoms of the second dimension of every input: the sequence, where that is what it is."""
    dims = space.model.analysis.dims
    leaves = space.model.graph.leaves_of(LeafKind.INPUT)
    second = (dims[leaf.name][1] for leaf in leaves if len(dims[leaf.name]) == 2)
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
    space: Space, inner: frozenset[int], roles: tuple[AxisRole, ...], *, sharded: bool
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
    for leaf, codes in zip(space.parameters, space.storage_codes, strict=True):
        atoms, dims = model.analysis.atoms[leaf.name], model.analysis.dims[leaf.name]
        placements: list[Placement] = []
        for role in roles:
            tensor = _shard(atoms, dims, lambda atom: atom in inner)
            placements.append(tensor if role != "data" and tensor else REPLICATE)
        layout = Layout(model.mesh, tuple(placements))
        if not fits(atoms, layout):
            layout = Layout.replicated(model.mesh)
        layout = _also_sharded(atoms, layout, roles) if sharded else layout
        storage[leaf.name] = encode(layout, atoms)
        assert storage[leaf.name] in codes
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
