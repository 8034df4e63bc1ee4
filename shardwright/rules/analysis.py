"""Analyses a whole graph: looks up each operator's rule, unifies and refines dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.ir.graph import Graph, Op
from shardwright.ir.layout import Atoms
from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, NotationError, elementwise, parse
from shardwright.rules.operators import reductions, table
from shardwright.rules.rule import Rule
from shardwright.rules.unify import Dim, refine_rule, unify

NO_ELEMENTS = "a tensor without elements cannot be split"
_UNKNOWN = "no rule is written, and experiments found no split that gives its results"


@dataclass(frozen=True)
class Analysis:
    """The unified dimensions of one graph and the rules of its operators.

    * `atoms`: per value name, the atom sizes of each of its dimensions;
    * `rules`: per operator name, its rule at the atoms' resolution: the rule's
      operands and results have exactly the atoms of the graph's values;
    * `discovered`: names of operators without a written rule, whose rule
      was found by experiment or stated by the user;
    * `unknown`: names of operators without any rule; their factors cannot be
      split, so they are computed replicated;
    * `dims`: per value name, the id of each atom in `atoms`: equal ids are the
      same dimension of the model.
    """

    atoms: Mapping[str, Atoms]
    rules: Mapping[str, Rule]
    unknown: tuple[str, ...] = ()
    dims: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    discovered: tuple[str, ...] = ()


def analyze(graph: Graph) -> Analysis:
    """Unify the dimensions of `graph` and find the rule of every operator."""
    notations, discovered, unknown = {}, [], []
    for op in graph.ops:
        notation = notation_of(graph, op)
        if notation is None and op.rule:
            notation = _attached_notation(Call(graph, op))
            discovered.append(op.name)
        elif notation is None:
            unknown.append(op.name)
            notation = _opaque(Call(graph, op), _UNKNOWN)
        notations[op.name] = notation
    unified = unify(graph, notations)
    leaves = {
        name: [dim.atoms() if dim is not None else [] for dim in value]
        for name, value in unified.values.items()
    }
    atom_ids = _atom_ids(leaves)
    rules = {
        op.name: refine_rule(
            notations[op.name],
            unified.indices[op.name],
            [leaves[name] for name in (*op.operands, *op.outputs)],
            atom_ids,
        )
        for op in graph.ops
    }
    atoms, dims = {}, {}
    for name, value in leaves.items():
        atoms[name] = tuple([tuple([atom.size for atom in one]) for one in value])
        dims[name] = tuple([tuple([atom_ids[atom] for atom in one]) for one in value])
    return Analysis(atoms, rules, tuple(unknown), dims, tuple(discovered))


def expand_analysis(
    analysis: Analysis, graph: Graph, representative: Mapping[str, str]
) -> Analysis:
    """The analysis of `graph`, from the analysis of a graph without its repeated layers.

    `representative` maps the name of every omitted operator, leaf and result to the name of the
    equal one that was analysed, whose rule, atoms and dimension ids it shares.
    Complexity: O(operators); `analyze` would unify the whole graph.
    """

    def like(name: str) -> str:
        return representative.get(name, name)

    found, unknown = set(analysis.discovered), set(analysis.unknown)
    return Analysis(
        {value.name: analysis.atoms[like(value.name)] for value in graph.values},
        {op.name: analysis.rules[like(op.name)] for op in graph.ops},
        tuple(op.name for op in graph.ops if like(op.name) in unknown),
        {value.name: analysis.dims[like(value.name)] for value in graph.values},
        tuple(op.name for op in graph.ops if like(op.name) in found),
    )


def notation_of(graph: Graph, op: Op) -> Notation | None:
    """The written rule of a call, or None if it has none."""
    call, kind = Call(graph, op), op.kind
    try:
        if op.target.split(".")[0] not in table.NAMESPACES:
            return None
        if any(0 in shape for shape in (*call.operands, *call.results)):
            return _opaque(call, NO_ELEMENTS)
        if kind in table.BUILDERS:
            return table.BUILDERS[kind](call)
        if kind in table.TEXT:
            text, work = table.TEXT[kind]
            return parse(text, call.operands, call.results, work=work)
        if kind in table.ELEMENTWISE:
            return elementwise(call.operands, call.results[0])
        if kind in table.LINEAR:
            linear = [[0]] if call.floating else []
            return elementwise(call.operands, call.results[0], linear=linear)
        if kind in table.LOSSES:
            return reductions.elementwise_loss(call)
        if kind in table.REDUCTIONS:
            return reductions.reduction(call)
        if kind in table.ALONG_DIM:
            return reductions.along_dim(call)
    except NotationError as e:
        raise NotationError(f"{op}: {e}") from e
    return None


def _attached_notation(call: Call) -> Notation:
    """The rule stored in the operator itself; raises `ValueError` if it does not fit its shapes."""
    try:
        return parse(call.op.rule, call.operands, call.results)
    except (NotationError, ValueError) as e:
        raise ValueError(
            f"the rule {call.op.rule!r} of {call.op.target} does not fit operands of shapes"
            f" {call.operands} and results of {call.results}: {e}"
        ) from e


def _opaque(call: Call, reason: str) -> Notation:
    """A rule in which all dimensions are unrelated and none may be split."""
    sizes: dict[str, int] = {}

    def dims(tag: str, shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        names = [f"{tag}d{d}" if size != 1 else "" for d, size in enumerate(shape)]
        sizes.update((n, size) for n, size in zip(names, shape, strict=True) if n)
        return tuple((n,) if n else () for n in names)

    operands = tuple(dims(f"i{i}", shape) for i, shape in enumerate(call.operands))
    results = tuple(dims(f"o{i}", shape) for i, shape in enumerate(call.results))
    work: tuple[str, ...] = ()
    if call.op.flop:  # an extra factor, whose size is the number of multiply-adds
        sizes["flop"], work = max(2, call.op.flop // 2), ("flop",)
    return Notation(operands, results, sizes, whole=frozenset(sizes), work=work, reason=reason)


def _atom_ids(values: Mapping[str, Sequence[list[Dim]]]) -> dict[Dim, int]:
    """Ids of atoms in order of appearance."""
    atom_ids: dict[Dim, int] = {}
    for value in values.values():
        for dim in value:
            for atom in dim:
                atom_ids.setdefault(atom, len(atom_ids))
    return atom_ids
