"""Accelerate's loop, training under a plan: a PlannedAccelerator prepares the planned module.

$ torchrun --nproc-per-node 2 examples/integrations/accelerate_mlp.py             # the fastest plan
$ torchrun --nproc-per-node 2 examples/integrations/accelerate_mlp.py plan.json   # one made before
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw
from shardwright.integrations.accelerate import PlannedAccelerator

BATCH, STEPS, ACCUMULATED, NORM = 32, 10, 2, 0.5


class Classifier(nn.Module):
    """A plain module, which knows nothing of all this."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, points: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.output(self.hidden(points).relu()), classes)


def data() -> TensorDataset:
    """Points and what is largest of their first coordinates, the same on every rank."""
    points = torch.randn(STEPS * BATCH, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :4].argmax(dim=1))


def train(module: nn.Module, accelerator: PlannedAccelerator) -> list[float]:
    """Losses of ten batches, of which two each make an update; gradients are clipped."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=BATCH)  # of the global batch
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(module):
            loss = module(*batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(module.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Ten batches, the same on any number of ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    model = Classifier()
    if sys.argv[1:]:
        plan = sw.Plan.load(sys.argv[1])
    else:
        machine = f"{os.environ['WORLD_SIZE']}xcpu"
        plan = sw.plan(model, data()[:BATCH], machine=machine, stages=(1,))
    cpu = not torch.cuda.is_available()
    accelerator = PlannedAccelerator(plan, cpu=cpu, gradient_accumulation_steps=ACCUMULATED)
    losses = train(sw.parallelize(model, plan), accelerator)
    found = " ".join(f"{loss:.6f}" for loss in losses)
    accelerator.print(f"plan: {plan}\nlosses: {found}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
