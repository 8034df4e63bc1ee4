"""A graph network and a recommender in plain PyTorch."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.batches import classes, integers, reals


class GraphConvolution(nn.Module):
    """A linear layer, and the weighted sum of each node's neighbours."""

    def __init__(self, inside, outside):
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x, sources, targets, weights):
        messages = self.linear(x)[sources] * weights[:, None]
        return messages.new_zeros(len(x), messages.shape[1]).index_add(0, targets, messages)


class GraphNetwork(nn.Module):
    """A GCN of one fixed graph, which classifies its nodes."""

    def __init__(self, nodes, edges, widths):
        super().__init__()
        self.register_buffer("sources", integers(nodes, edges))
        self.register_buffer("targets", integers(nodes, edges).flip(0))
        degrees = torch.ones(nodes).index_add(0, self.targets, torch.ones(edges))
        self.register_buffer("weights", (degrees[self.sources] * degrees[self.targets]).rsqrt())
        self.layers = nn.ModuleList(GraphConvolution(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths[1:-1])

    def forward(self, features, classes):
        x = features
        for layer, norm in zip(self.layers, [*self.norms, None], strict=True):
            x = layer(x, self.sources, self.targets, self.weights)
            if norm is not None:
                x = F.dropout(F.relu(norm(x)), 0.5, self.training)
        return F.cross_entropy(x, classes)


class Recommender(nn.Module):
    """DLRM: bags of embeddings, their products with each other, and the chance of a click."""

    def __init__(self, tables, dense, width, bottom, top):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for rows in tables)
        self.bottom = _layers([dense, *bottom, width])
        vectors = len(tables) + 1
        pairs = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1])
        self.top = _layers([width + pairs.shape[1], *top])
        self.head = nn.Linear(top[-1], 1)

    def forward(self, dense, sparse, clicks):
        x = self.bottom(dense)
        bags = [table(ids) for table, ids in zip(self.tables, sparse.unbind(1), strict=True)]
        vectors = torch.stack([x, *bags], 1)  # (B, vectors, width)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        logits = self.head(self.top(torch.cat([x, products], 1)))
        return F.binary_cross_entropy_with_logits(logits[:, 0], clicks)


def _layers(widths):
    return nn.Sequential(
        *(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU()))
    )


CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992,
    5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


def graph_network(published=False):
    """The one that the Open Graph Benchmark compares with on ogbn-arxiv."""
    torch.manual_seed(0)
    nodes, edges, widths = (
        (169343, 1166243, [128, 256, 256, 40]) if published else (11, 29, [6, 9, 4])
    )
    return GraphNetwork(nodes, edges, widths), {
        "features": reals(nodes, widths[0]),
        "classes": classes(nodes, widths[-1]),
    }


def recommender(published=False):
    """DLRM as on Criteo's Kaggle set."""
    torch.manual_seed(0)
    tables, bag, batch = (CRITEO, 1, 2048) if published else ((7, 3, 12), 2, 5)
    if published:
        model = Recommender(tables, 13, 16, [512, 256, 64], [512, 256])
    else:
        model = Recommender(tables, 4, 6, [9], [10, 7])
    sparse = torch.stack([integers(rows, batch, bag) for rows in tables], 1)
    return model, {
        "dense": reals(batch, model.bottom[0].in_features),
        "sparse": sparse,
        "clicks": classes(batch, 2).float(),
    }


GRAPHS_AND_TABLES = {"gcn": graph_network, "dlrm": recommender}
