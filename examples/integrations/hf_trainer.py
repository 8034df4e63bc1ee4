"""Hugging Face's Trainer, training a GPT-2 under a plan.

To the Trainer there is one device: it gets the global batch, and the planned module takes each
rank's part of it. Started again it goes on from the last checkpoint, also on other devices.

$ torchrun --nproc-per-node 2 examples/integrations/hf_trainer.py             # to runs/gpt2
$ torchrun --nproc-per-node 4 examples/integrations/hf_trainer.py runs/gpt2   # on from there
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from shardwright.integrations.hugging_face import PlannedTrainer

BATCH, LENGTH, SAMPLES = 4, 32, 40


def gpt2() -> GPT2LMHeadModel:
    """A plain model, which knows nothing of all this."""
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **sizes))


def data() -> list[dict[str, torch.Tensor]]:
    """Sequences that count on from a random token, the same on every rank."""
    first = torch.randint(256, (SAMPLES, 1), generator=torch.Generator().manual_seed(0))
    tokens = (first + torch.arange(LENGTH)) % 256
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    """Twenty steps, the same on any number of ranks."""
    folder = sys.argv[1] if sys.argv[1:] else "runs/gpt2"  # that all ranks see
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        save_strategy="epoch",
        logging_steps=1,
        learning_rate=3e-3,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = PlannedTrainer(
        gpt2(),
        arguments,
        machine=f"{ranks}xcpu",  # "8xH100", or plan=sw.Plan.load("plan.json")
        train_dataset=data(),
        data_collator=default_data_collator,
    )
    saved = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=saved)
    trainer.save_model()  # what from_pretrained reads
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = " ".join(f"{loss:.4f}" for loss in losses)
        # In one piece, so that what other ranks write does not come between.
        sys.stdout.write(f"plan: {trainer.plan}\nlosses: {found}\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
