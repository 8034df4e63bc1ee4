"""The forms of a graph whose loss and MLPs are computed in chunks."""

from __future__ import annotations

from shardwright.ir.graph import Graph
from shardwright.rules.operators.loss_chunks import with_loss_chunks
from shardwright.rules.operators.mlp_chunks import with_mlp_chunks


def with_chunks(graph: Graph, loss: int, mlp: int) -> Graph:
    """`graph` with its loss and its MLPs in so many chunks; itself if they are.

    Raises `LossChunksError` or `MlpChunksError`, with the reason, if they cannot be.
    """
    if loss != graph.numerics.loss_chunks:
        graph = with_loss_chunks(graph, loss)
    return graph if mlp == graph.numerics.mlp_chunks else with_mlp_chunks(graph, mlp)
