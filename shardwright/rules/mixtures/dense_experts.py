"""Finds experts that all compute every token, so that no token is sent to an expert.

Such layers choose experts for each token, and multiply the rows of all tokens by the weights of
all experts in one batched product; scores of zero, before the product or behind it, cancel what was
not chosen. Llama-4 and older GPT-OSS of transformers are written so. Capture replaces them where
results are equal (`tracing/rewrites/dense_mixtures.py`); others compute what their code says. The
user is told of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.ir.graph import Graph, LeafKind, Op

_PRODUCTS = ("bmm", "einsum", "matmul")  # of results (experts, tokens, width)
# Operators between a parameter and the product that reads it.
_VIEWS = ("view", "reshape", "permute", "transpose", "unsqueeze", "expand", "_to_copy", "alias")


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """The experts of one layer, of which each computes every token.

    Attributes:
        module: its path.
        experts: how many experts there are.
        chosen: how many are chosen for a token.
    """

    module: str
    experts: int
    chosen: int


def dense_experts(graph: Graph) -> list[DenseExperts]:
    """The layers whose experts compute every token, in the order of the graph."""
    choices = list(_choices(graph))
    if not choices:
        return []
    producers = {name: op for op in graph.ops for name in op.outputs}
    parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    found: dict[str, DenseExperts] = {}
    for op in graph.ops:
        if op.kind not in _PRODUCTS:
            continue
        weights = parameters.intersection(_origin(name, producers) for name in op.operands)
        rows = graph.tensor[op.outputs[0]].shape[:-1]
        for module, tokens, experts, chosen in choices:
            if (
                any(graph.tensor[name].shape[:1] == (experts,) for name in weights)
                and experts in rows
                and prod(rows) == experts * tokens
                and _is_inside(op.source.module, module)
            ):
                one = DenseExperts(op.source.module, experts, chosen)
                found.setdefault(op.source.module, one)
    return list(found.values())


def dense_experts_note(graph: Graph, before: Sequence[DenseExperts] = ()) -> str:
    """Sentences on such layers, with what to do; empty if there are none.

    `before` are those that were there before mixtures took their place. Of layers with equally many
    experts the first is reported.
    """
    left = dense_experts(graph)
    sentences = [
        f"{one.experts} experts of {where} are computed only for the tokens that chose them"
        " (the model's code computes all for every token; the results are equal)"
        for one, where in _by_kind([one for one in before if one not in left])
    ]
    sentences += [
        f"all {one.experts} experts of {where} compute every token, as the model's code does,"
        f" though {one.chosen} of {one.experts} are chosen: ep has nothing to send, and MFU counts"
        " all of their products; tp and dp_shard split them, and a layer"
        " that sorts tokens by expert (grouped products) would compute a part"
        for one, where in _by_kind(left)
    ]
    return "; ".join(sentences)


def _by_kind(layers: Sequence[DenseExperts]) -> Iterator[tuple[DenseExperts, str]]:
    """The first of the layers with equally many experts, and where all of these are."""
    for kind in dict.fromkeys((one.experts, one.chosen) for one in layers):
        same = [one for one in layers if (one.experts, one.chosen) == kind]
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        yield same[0], f"{same[0].module or 'the model'}{more}"


def _choices(graph: Graph) -> Iterator[tuple[str, int, int, int]]:
    """Choices of experts: the module around, tokens, experts, and how many are chosen."""
    for op in graph.ops:
        if op.kind != "topk":
            continue
        scores = graph.tensor[op.operands[0]]
        chosen = graph.tensor[op.outputs[0]].shape
        if scores.shape and 0 < chosen[-1] < scores.shape[-1]:
            tokens = scores.num_elements // scores.shape[-1]
            around = op.source.module.rpartition(".")[0]
            yield around, tokens, scores.shape[-1], chosen[-1]


def _is_inside(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


def _origin(name: str, producers: dict[str, Op]) -> str:
    """The value that `name` is a view or a cast of."""
    while (op := producers.get(name)) is not None and op.kind in _VIEWS:
        name = op.operands[0]
    return name
