"""A Trainer's run that saves, stops and resumes: `FOLDER STOP [PLAN]`, with a plan on ranks.

Prints the losses as JSON and writes the weights at the end into FOLDER/final.pt.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

BATCH, LENGTH, SAMPLES = 4, 16, 22  # the last batch of an epoch is smaller


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes, **dropout)).double()


def data():
    """Sequences with different numbers of ignored labels."""
    tokens = torch.randint(64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = []
    for number, row in enumerate(tokens):
        labels = row.clone()
        labels[: number % 7] = -100
        rows.append({"input_ids": row, "labels": labels})
    return rows


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step


def arguments(folder):
    return TrainingArguments(
        str(folder / "run"),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        max_steps=8,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )


def accuracy(found):
    """Of next tokens, from the logits of the whole data."""
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": len(found.predictions)}


def run(folder, stop, make=Trainer, resume=False, **options):
    """Losses of the run's steps and evaluations, and the trainer after it."""
    trainer = make(
        gpt2(),
        arguments(folder),
        train_dataset=data(),
        eval_dataset=data(),
        data_collator=default_data_collator,
        callbacks=[StopAt(stop)],
        compute_metrics=accuracy,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    names = ("loss", "eval_loss", "eval_accuracy", "eval_samples", "grad_norm")
    history = [[e["step"], n, e[n]] for e in trainer.state.log_history for n in names if n in e]
    return history, trainer


def main():
    import torch.distributed as dist

    import shardwright as sw
    from shardwright.integrations.hugging_face import PlannedTrainer
    from shardwright.train.checkpoint.export import full_state_dict

    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    options = {"plan": sw.Plan.load(sys.argv[3])} if sys.argv[3:] else {"machine": "2xcpu"}
    resume = any((folder / "run").glob("checkpoint-*"))
    history, trainer = run(folder, stop, PlannedTrainer, resume, **options)
    trainer.save_model(str(folder / "saved"))
    weights = full_state_dict(trainer.model, gpt2())
    if dist.get_rank() == 0:
        torch.save(weights, folder / "final.pt")
        (folder / "history.json").write_text(json.dumps(history))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
