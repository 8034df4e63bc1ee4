"""Finds experts that all compute every token, so that no token is sent to an expert.

Such layers choose experts for each token, and multiply the rows of all tokens by the weights of
all experts in one batched product; scores of zero, before the product or behind it, cancel what was
not chosen. Llama-4 and GPT-OSS of transformers are written so. The model gets what its code says;
what differs from other mixtures is said to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.ir.graph import Graph, LeafKind, Op

_PRODUCTS = ("bmm", "einsum")  # of results (experts, tokens, width)
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
                and sorted(rows) == sorted((experts, tokens))
                and _is_inside(op.source.module, module)
            ):
                one = DenseExperts(op.source.module, experts, chosen)
                found.setdefault(op.source.module, one)
    return list(found.values())


def dense_experts_note(graph: Graph) -> str:
    """A sentence on such layers, with what to do; empty if there are none.

    Of layers with equally many experts the first is reported.
    """
    found = dense_experts(graph)
    sentences = []
    for experts, chosen in dict.fromkeys((one.experts, one.chosen) for one in found):
        same = [one for one in found if (one.experts, one.chosen) == (experts, chosen)]
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        sentences.append(
            f"all {experts} experts of {same[0].module or 'the model'}{more} compute every token,"
            f" as the model's code does, though {chosen} of {experts} are chosen: ep has nothing to"
            " send, and MFU counts all of their products; tp and dp_shard split them, and a layer"
            " that sorts tokens by expert (grouped products) would compute a part"
        )
    return "; ".join(sentences)


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
