"""Lightning's Trainer, training under a plan: a strategy, and a LightningModule as it was.

$ torchrun --nproc-per-node 2 examples/integrations/lightning_mlp.py             # the fastest plan
$ torchrun --nproc-per-node 2 examples/integrations/lightning_mlp.py plan.json   # one made before
"""

from __future__ import annotations

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw
from shardwright.integrations.lightning import PlannedStrategy

BATCH, STEPS = 32, 10


class Classifier(nn.Module):
    """A plain module, which knows nothing of all this."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, points: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.output(self.hidden(points).relu()), classes)


class Training(lightning.LightningModule):
    """A LightningModule, whose `model` the strategy plans."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
        """The loss of a global batch; the module takes this rank's part of it."""
        loss: torch.Tensor = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Called when `model` runs the plan; its parameters have their own names."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> TensorDataset:
    """Points and what is largest of their first coordinates, the same on every rank."""
    points = torch.randn(STEPS * BATCH, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :4].argmax(dim=1))


def main() -> None:
    """Ten steps, the same on any number of ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    ranks = int(os.environ["WORLD_SIZE"])
    model = Classifier()
    if sys.argv[1:]:
        plan = sw.Plan.load(sys.argv[1])
    else:
        plan = sw.plan(model, data()[:BATCH], machine=f"{ranks}xcpu", stages=(1,))
    module = Training(model)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PlannedStrategy(plan),
        use_distributed_sampler=False,  # every rank gets the global batch
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(), BATCH))
    if trainer.is_global_zero:
        found = " ".join(f"{loss:.6f}" for loss in module.losses)
        # In one piece, so that what other ranks write does not come between.
        sys.stdout.write(f"plan: {plan}\nlosses: {found}\n")


if __name__ == "__main__":
    main()
