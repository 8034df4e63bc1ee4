"""Dimensions of a model that strategies split: batch, sequence, heads, inner features, experts.

Each is a set of atoms of the graph's analysis. Inner features are those of Megatron-LM (arXiv
1909.08053): attention heads and the inner dimension of an MLP, so that column- and row-parallel
layers alternate, and the vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.ir.strategy.strategy import ModelLimits
from shardwright.planner.space.clusters import constant_values
from shardwright.rules.analysis import Analysis
from shardwright.rules.rule import FactorKind, Rule

_PRODUCTS = ("linear", "mm", "addmm", "bmm", "matmul")


@dataclass(frozen=True)
class ModelDimensions:
    """Atoms of each dimension that a strategy splits, and the sizes of all atoms.

    Attributes:
        batch: atoms of the leading dimension of inputs.
        sequence: atoms of the second dimension of inputs of tokens.
        heads: atoms of attention heads, of queries and of keys.
        inner: atoms that tensor parallelism splits, one for each weight matrix.
        experts: atoms of the experts of mixture-of-experts layers.
        logits: the operators that read logits: the cross entropies, and those between them and the
            projections.
        sizes: the size of each atom.
    """

    batch: frozenset[int]
    sequence: frozenset[int]
    heads: frozenset[int]
    inner: frozenset[int]
    experts: frozenset[int]
    logits: frozenset[str]
    sizes: dict[int, int]

    @classmethod
    def of(cls, graph: Graph, analysis: Analysis) -> ModelDimensions:
        """The dimensions of an analysed graph."""
        sizes = {
            atom: size
            for name, dims in analysis.dims.items()
            for ids, lengths in zip(dims, analysis.atoms[name], strict=True)
            for atom, size in zip(ids, lengths, strict=True)
        }
        batch, sequence = batch_atoms(graph, analysis), sequence_atoms(graph, analysis)
        experts = frozenset(
            rule.factor[owner].atom for rule in analysis.rules.values() for _, owner in rule.routes
        )
        return cls(
            batch,
            sequence,
            _heads(graph, analysis) - batch,
            inner_atoms(graph, analysis, batch | experts),
            experts,
            _logits_readers(graph, analysis),
            sizes,
        )

    def splits(self, degree: int) -> frozenset[int]:
        """The inner atoms that tensor parallelism of this degree splits evenly."""
        return frozenset(atom for atom in self.inner if self.sizes[atom] % degree == 0)

    def limits(self, graph: Graph, analysis: Analysis, layers: int) -> ModelLimits:
        """The sizes that limit degrees; `graph` may be shortened, `layers` is the full number."""
        attention = [_query_heads(op, graph, analysis) for op in attention_ops(graph, analysis)]
        heads = [math.prod(self.sizes[atom] for atom in atoms) for atoms in attention if atoms]
        split = [self.sizes[a] for atoms in attention for a in atoms if a in self.inner]
        experts = [self.sizes[atom] for atom in self.experts]
        return ModelLimits(
            batch=_product(self, self.batch),
            sequence=_product(self, self.sequence),
            heads=math.gcd(*heads) if heads else None,
            key_value_heads=math.gcd(*split) if split else None,
            layers=layers or None,
            experts=math.gcd(*experts) if experts else None,
        )


def attention_ops(graph: Graph, analysis: Analysis) -> Sequence[Op]:
    """The operators that compute an entire attention (fused or scaled dot product attention)."""
    return [op for op in graph.ops if is_attention(op, analysis.rules[op.name])]


def is_attention(op: Op, rule: Rule) -> bool:
    """Whether an operator computes attention of queries, keys and values."""
    return "attention" in op.kind or bool(rule.joint_splits)


def _logits_readers(graph: Graph, analysis: Analysis) -> frozenset[str]:
    """Cross entropies, and what is between them and the products that make logits."""
    found = set[str]()
    for loss in graph.ops:
        if loss.kind != "cross_entropy_loss" or not analysis.dims[loss.operands[0]]:
            continue
        classes, left = set(analysis.dims[loss.operands[0]][-1]), [loss]
        while left:
            op = left.pop()
            if op.name in found or op.kind in _PRODUCTS:
                continue
            found.add(op.name)
            carry = (v for v in op.operands if classes & {a for d in analysis.dims[v] for a in d})
            left += [graph.producer[value] for value in carry if value in graph.producer]
    return frozenset(found)


def _product(dims: ModelDimensions, atoms: frozenset[int]) -> int | None:
    return min((dims.sizes[atom] for atom in atoms), default=None)


def batch_atoms(graph: Graph, analysis: Analysis) -> frozenset[int]:
    """Atoms of the batch: the leading dimension of every input, and of its rows in another order.

    Rows are in another order that is constant where images are cut into windows.
    """
    dims = (analysis.dims[leaf.name] for leaf in graph.leaves_of(LeafKind.INPUT))
    found = {one[0][0] for one in dims if one and one[0]}
    constant = constant_values(graph)
    for op in graph.ops:
        if op.kind != "index" or len(op.operands) != 2 or op.operands[1] not in constant:
            continue
        rows, order = op.operands
        whole = graph.tensor[order].shape == graph.tensor[rows].shape[:1]
        if whole and found & {*analysis.dims[rows][0][:1]}:
            found.update(analysis.dims[op.outputs[0]][0][:1])
    return frozenset(found)


def sequence_atoms(graph: Graph, analysis: Analysis) -> frozenset[int]:
    """Atoms of the second dimension of inputs of tokens."""
    leaves = graph.leaves_of(LeafKind.INPUT)
    tokens = [leaf.name for leaf in leaves if "int" in graph.tensor[leaf.name].dtype]
    dims = (analysis.dims[name] for name in tokens if len(analysis.dims[name]) == 2)
    return frozenset(one[1][0] for one in dims if one[1])


def _query_heads(op: Op, graph: Graph, analysis: Analysis) -> tuple[int, ...]:
    """Atoms of the heads of an attention's queries, (batch, heads, length, width)."""
    dims = analysis.dims[op.operands[0]]
    return dims[1] if len(dims) == 4 else ()


def _heads(graph: Graph, analysis: Analysis) -> frozenset[int]:
    found = (_query_heads(op, graph, analysis) for op in attention_ops(graph, analysis))
    return frozenset(atom for atoms in found for atom in atoms)


def inner_atoms(graph: Graph, analysis: Analysis, whole: frozenset[int]) -> frozenset[int]:
    """The first atom of each weight matrix that all operators can split.

    The residual stream, which is the atom that most weights have, and the atoms in `whole` stay
    whole. One atom is chosen for each weight that has no chosen atom yet.
    """
    parameters = graph.leaves_of(LeafKind.PARAMETER)
    weights = [leaf.name for leaf in parameters if len(analysis.atoms[leaf.name]) > 1]
    counts = Counter(
        atom for name in weights for atom in {a for dim in analysis.dims[name] for a in dim}
    )
    stream = {atom for atom, count in counts.most_common(1) if count > 2}
    unsplittable = {
        factor.atom
        for rule in analysis.rules.values()
        for factor in rule.factors
        if factor.kind is FactorKind.WHOLE
    }
    forbidden = unsplittable | stream | whole
    chosen: set[int] = set()
    for name in weights:
        atoms = [atom for dim in analysis.dims[name] for atom in dim]
        if chosen.isdisjoint(atoms):
            free = [atom for atom in atoms if atom not in forbidden]
            chosen.update(free[:1])
    return frozenset(chosen)
