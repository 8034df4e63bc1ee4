"""The smallest job: a plain PyTorch classifier of the quadrant that a point lies in.

$ shardwright run examples/mlp.py:job --devices 2
$ shardwright plan examples/mlp.py:job --machine 8xH100 --set hidden=4096 --set batch=8192
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

import shardwright as sw

BATCH, POINT, HIDDEN, CLASSES = 32, 16, 64, 4


class Classifier(nn.Module):
    """Two layers and their loss: what the module returns is what will be minimised."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(POINT, hidden)
        self.output = nn.Linear(hidden, CLASSES)

    def forward(self, points: torch.Tensor, quadrants: torch.Tensor) -> torch.Tensor:
        scores = self.output(torch.relu(self.hidden(points)))
        return nn.functional.cross_entropy(scores, quadrants)


def data(batch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random points, for ever; the same ones on every rank."""
    generator = torch.Generator().manual_seed(0)
    while True:
        points = torch.randn(batch, POINT, generator=generator)
        x, y = points[:, 0] > 0, points[:, 1] > 0
        yield {"points": points, "quadrants": 2 * x.long() + y.long()}


def job(batch: int = BATCH, hidden: int = HIDDEN) -> sw.Job:
    """What `shardwright` plans, trains and verifies; `--set` changes its arguments."""
    return sw.Job(
        name="mlp",
        model=lambda: Classifier(hidden),
        batch=lambda: next(data(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=lambda: data(batch),
        steps=30,
    )
