"""Hugging Face's Trainer, training a GPT-2 under a plan.

To Trainer, and to accelerate below it, every rank is alone: it gets the global batch, and nothing
wraps the module, which takes its part and does all that is communicated. On GPUs give each rank
its own by CUDA_VISIBLE_DEVICES, so that Trainer sees one.

$ torchrun --nproc-per-node 2 examples/integrations/hf_trainer.py             # the fastest plan
$ torchrun --nproc-per-node 2 examples/integrations/hf_trainer.py plan.json   # one made before
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import shardwright as sw

BATCH, LENGTH, STEPS = 4, 32, 5
# Planned modules draw the same numbers under every plan, and others than torch's own dropout.
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


class PlannedTrainer(Trainer):
    """A Trainer of a module that `parallelize` made of a Hugging Face model."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> Any:
        """The loss of a global batch; the module takes this rank's part of it."""
        return model(**inputs)


def gpt2() -> GPT2LMHeadModel:
    """A plain model, which knows nothing of all this."""
    torch.manual_seed(0)  # the same weights on every rank
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        use_cache=False,
        **NO_DROPOUT,
    )
    return GPT2LMHeadModel(config)


def data() -> list[dict[str, torch.Tensor]]:
    """Sequences, the same on every rank."""
    tokens = torch.randint(256, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(model: torch.nn.Module) -> list[float]:
    """The loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=1e-3,
            use_cpu=True,
            seed=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = PlannedTrainer(model, arguments, train_dataset=data())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    """Five steps, the same on any number of ranks."""
    dist.init_process_group("gloo")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # they have met: Trainer need not know
    model, ranks = gpt2(), dist.get_world_size()
    if sys.argv[1:]:
        plan = sw.Plan.load(sys.argv[1])
    else:
        example = default_data_collator(data()[:BATCH])
        plan = sw.plan(model, kwargs=example, machine=sw.Machine.preset(f"{ranks}xcpu"))
    losses = train(sw.parallelize(model, plan))
    if dist.get_rank() == 0:
        found = " ".join(f"{loss:.4f}" for loss in losses)
        # In one piece, so that what other ranks write does not come between.
        sys.stdout.write(f"plan: {plan}\nlosses: {found}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
