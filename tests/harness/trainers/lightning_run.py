"""A Lightning run that saves, stops and resumes: `FOLDER EPOCHS [PLAN]`, with a plan on ranks.

Writes losses as JSON into FOLDER/history.json, and the weights at the end into FOLDER/final.pt.
"""

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.harness.trainers.classifier import BATCH, Classifier, data


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Classifier()
        self.losses = []

    def training_step(self, batch, index):
        loss = self.model(*batch)["loss"]
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        found = self.model(*batch)
        right = found["scores"].argmax(-1) == batch[1]
        self.log("val_loss", found["loss"], batch_size=len(batch[1]))
        self.log("accuracy", right.double().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def run(folder, epochs, **options):
    """Losses and metrics of a run that goes on from the last checkpoint in `folder`."""
    module = Lit()
    saved = folder / "saved"
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        callbacks=[ModelCheckpoint(saved, save_last=True)],
        num_sanity_val_steps=0,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    last = saved / "last.ckpt"
    loader = DataLoader(data(), BATCH)
    trainer.fit(module, loader, loader, ckpt_path=last if last.exists() else None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": module.losses, **metrics}, module.model


def main():
    import torch.distributed as dist

    import shardwright as sw
    from shardwright.integrations.lightning import PlannedStrategy
    from shardwright.train.checkpoint.export import full_state_dict

    folder, plan = Path(sys.argv[1]), sw.Plan.load(sys.argv[3])
    strategy = PlannedStrategy(plan)
    history, module = run(folder, int(sys.argv[2]), strategy=strategy, devices=plan.devices)
    weights = full_state_dict(module, Classifier())
    if dist.get_rank() == 0:
        torch.save(weights, folder / "final.pt")
        (folder / "history.json").write_text(json.dumps(history))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
