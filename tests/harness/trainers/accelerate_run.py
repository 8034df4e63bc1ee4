"""An accelerate run that saves, stops and resumes: `FOLDER EPOCHS [PLAN]`, with a plan on ranks.

Writes losses as JSON into FOLDER/history.json, and the weights at the end into FOLDER/final.pt.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.harness.trainers.classifier import BATCH, Classifier, data


def run(accelerator, module, folder, epochs):
    """Losses and the norms of gradients of a run that goes on from the state in `folder`."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    torch.manual_seed(1)  # the same order of samples on every rank
    loader = DataLoader(data(), BATCH, shuffle=True)
    module, optimizer, loader, schedule = accelerator.prepare(module, optimizer, loader, schedule)
    state, place, history = folder / "state", folder / "epoch.json", []
    first = json.loads(place.read_text()) if place.exists() else 0
    if first:
        accelerator.load_state(str(state))
    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(module):
                loss = module(*batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(module.parameters(), 0.05)
                    history.append(float(norm))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            history.append(loss.item())
    accelerator.save_state(str(state))
    if accelerator.is_main_process:
        place.write_text(json.dumps(epochs))
    return history, module


def main():
    import torch.distributed as dist

    import shardwright as sw
    from shardwright.integrations.accelerate import PlannedAccelerator
    from shardwright.train.checkpoint.export import full_state_dict

    folder, epochs, plan = Path(sys.argv[1]), int(sys.argv[2]), sw.Plan.load(sys.argv[3])
    accelerator = PlannedAccelerator(plan, cpu=True, gradient_accumulation_steps=2)
    planned = sw.parallelize(Classifier(), plan, outputs="model")
    history, module = run(accelerator, planned, folder, epochs)
    weights = full_state_dict(module, Classifier())
    if dist.get_rank() == 0:
        torch.save(weights, folder / "final.pt")
        (folder / "history.json").write_text(json.dumps(history))
    dist.destroy_process_group()


def alone(folder, epochs):
    """The same by a plain Accelerator on one device."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    return run(accelerator, Classifier(), folder, epochs)


if __name__ == "__main__":
    main()
