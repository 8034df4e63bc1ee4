"""Lightning's Trainer, training under a plan: its ModelParallelStrategy takes modules of DTensors.

$ torchrun --nproc-per-node 2 examples/integrations/lightning_mlp.py             # the fastest plan
$ torchrun --nproc-per-node 2 examples/integrations/lightning_mlp.py plan.json   # one made before
"""

from __future__ import annotations

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw

BATCH, STEPS = 32, 10


class Planned(lightning.LightningModule):
    """Any module whose forward pass returns the loss, under a plan."""

    def __init__(self, model: nn.Module, plan: sw.Plan) -> None:
        super().__init__()
        self.serial, self.model = [model], None  # in a list: Lightning need not know its parameters
        self.plan = plan
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Lightning calls this on every rank, when they have met, and perhaps again."""
        if self.model is None:
            self.model = sw.parallelize(*self.serial, self.plan)

    def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
        """The loss of a global batch; the module takes this rank's part of it."""
        loss: torch.Tensor = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Its parameters are DTensors under their own names."""
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


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


def main() -> None:
    """Ten steps, the same on any number of ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    ranks = int(os.environ["WORLD_SIZE"])
    model = Classifier()
    if sys.argv[1:]:
        plan = sw.Plan.load(sys.argv[1])
    else:
        plan = sw.plan(model, data()[:BATCH], machine=sw.Machine.preset(f"{ranks}xcpu"))
    module = Planned(model, plan)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks),
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
