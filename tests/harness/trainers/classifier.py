"""A model in float64 that returns its loss and scores, and its data."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH, SAMPLES = 8, 32


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.norm = nn.Linear(16, 32), nn.BatchNorm1d(32)
        self.output = nn.Linear(32, 4)
        self.double()

    def forward(self, points, classes):
        scores = self.output(self.norm(self.hidden(points)).relu())
        return {"loss": nn.functional.cross_entropy(scores, classes), "scores": scores}


def data():
    points = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0)).double()
    return TensorDataset(points, points[:, :4].argmax(dim=1))
