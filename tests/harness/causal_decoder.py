"""Two layers of causal attention, with operators behind each that may need their neighbours."""

import torch
from torch import nn


class Decoder(nn.Module):
    """Two layers of causal attention, with `between` behind each."""

    def __init__(self, between=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.inner = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.between = between or nn.Identity()

    def forward(self, ids, labels):
        x = self.embed(ids)
        for inner in self.inner:
            heads = inner(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.between(seen.transpose(1, 2).flatten(-2))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Running(nn.Module):
    """Means of all rows so far, which no device has without its neighbours."""

    def forward(self, x):
        return x.cumsum(1) / x.shape[1]


def words(rows=4, length=12):
    ids = torch.randint(16, (rows, length))
    return {"ids": ids, "labels": ids.clone()}
