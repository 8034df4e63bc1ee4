"""Names the dimensions of a model: batch, sequence, heads, features.

Unification finds equal dimensions but not their names. A name follows from the operators in which
the dimension occurs; more specific operators take precedence. Names are used in printed text and in
the user's constraints.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.rules.analysis import Analysis
from shardwright.rules.rule import JointSplit, PassPartial, Route, Rule, Tiling

# Per operator, words for the indices of its notation.
_ATTENTION = {"h": "heads", "r": "queries per head", "l": "sequence"}
_ATTENTION |= {"s": "sequence", "t": "sequence"}
_ATTENTION |= {"e": "head width", "f": "head width"}
_EMBEDDING = {"v": "vocabulary", "h": "hidden"}
_CONVOLUTION = {"o": "channels", "c": "channels", "g": "groups", "b": "batch"}
_PRODUCTS = ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm")


def dimension_names(graph: Graph, analysis: Analysis) -> dict[int, str]:
    """A name for each atom, by its id in `analysis.dims`; atoms without a name are omitted."""
    names: dict[int, str] = {}
    for atom, word in _suggestions(graph, analysis):
        names.setdefault(atom, word)
    return names


def split_words(rule: Rule, tiling: Tiling, names: dict[int, str]) -> tuple[str, ...]:
    """The name of the dimension that a tiling splits along each axis; "-" for none.

    A split sum is marked: "features (sum)" leaves partial sums. "batch to experts" splits both and
    sends rows to the devices of their experts (all-to-all).
    """
    words = []
    for choice in tiling:
        if cut := rule.cuts(choice):
            factor = rule.factor[cut[0]]
            word = names.get(factor.atom, "features")
            in_results = all(any(cut[0] in dim for dim in dims) for dims in rule.results)
            if isinstance(choice, Route):
                rows, owners = (names.get(rule.factor[f].atom, "rows") for f in cut)
                words.append(f"{rows} to {owners}")
            elif isinstance(choice, JointSplit):
                words.append(f"{word} ({'ring' if 's' in cut else 'halves'})")
            else:
                words.append(word if in_results else f"{word} (sum)")
        else:
            words.append("partial sums" if isinstance(choice, PassPartial) else "-")
    return tuple(words)


def _suggestions(graph: Graph, analysis: Analysis) -> Iterator[tuple[int, str]]:
    """Pairs of an atom and a name for it, most specific first."""
    inputs = [(leaf, graph.tensor[leaf.name]) for leaf in graph.leaves_of(LeafKind.INPUT)]
    for leaf, _ in inputs:
        for atom in analysis.dims[leaf.name][:1]:
            yield from ((one, "batch") for one in atom)
    yield from _roles(graph, analysis, "scaled_dot_product_attention", _ATTENTION)
    for leaf, tensor in inputs:
        if "int" in tensor.dtype and len(tensor.shape) == 2:
            yield from ((one, "sequence") for one in analysis.dims[leaf.name][1])
    yield from _roles(graph, analysis, "embedding", _EMBEDDING)
    yield from _roles(graph, analysis, "embedding_bags", _EMBEDDING)
    for kind in ("conv1d", "conv2d", "conv3d"):
        yield from _roles(graph, analysis, kind, _CONVOLUTION)
    for op in _of_kind(graph, "matmul", "bmm"):
        rule = analysis.rules[op.name]
        yield from (
            (factor.atom, "heads")
            for factor in rule.factors
            if factor.name.startswith("b0") and factor.name in rule.work
        )
    yield from _roles(graph, analysis, "cross_entropy_loss", {"c": "classes"})
    yield from _roles(graph, analysis, "linear_cross_entropy", {"c": "classes"})
    yield from _roles(graph, analysis, "experts", {"e": "experts"})
    yield from _roles(graph, analysis, "chunked_mlp", dict.fromkeys("hio", "features"))
    for kind in _PRODUCTS:
        yield from _roles(graph, analysis, kind, {"n": "features", "k": "features"})


def _roles(
    graph: Graph, analysis: Analysis, kind: str, words: dict[str, str]
) -> Iterator[tuple[int, str]]:
    for op in _of_kind(graph, kind):
        for factor in analysis.rules[op.name].factors:
            word = words.get(factor.name.split(".")[0])
            if word:
                yield factor.atom, word


def _of_kind(graph: Graph, *kinds: str) -> Iterator[Op]:
    return (op for op in graph.ops if op.kind in kinds)
