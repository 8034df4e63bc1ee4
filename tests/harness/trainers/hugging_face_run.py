"""A Trainer's run that saves, stops and resumes: `FOLDER STOP [PLAN]`, with a plan on ranks.

Writes losses (FOLDER/history.json), the weights after the last step (FOLDER/final.pt), and those of
the best checkpoint (FOLDER/best.pt), which is the first one, as its loss is the highest.
"""

import copy
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
    """Stops after a step, and keeps the weights that it has `read` of the model then."""

    def __init__(self, step, read):
        self.step, self.read = step, read

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step >= self.step:
            control.should_training_stop = True
            self.weights = self.read(model)


def copied(model):
    return copy.deepcopy(model.state_dict())


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
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )


def accuracy(found):
    """Of next tokens, from the logits of the whole data."""
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": len(found.predictions)}


def run(folder, stop, make=Trainer, resume=False, read=copied, **options):
    """Losses of the run's steps and evaluations, weights after it, and the trainer."""
    end = StopAt(stop, read)
    trainer = make(
        gpt2(),
        arguments(folder),
        train_dataset=data(),
        eval_dataset=data(),
        data_collator=default_data_collator,
        callbacks=[end],
        compute_metrics=accuracy,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    names = ("loss", "eval_loss", "eval_accuracy", "eval_samples", "grad_norm")
    history = [[e["step"], n, e[n]] for e in trainer.state.log_history for n in names if n in e]
    return history, end.weights, trainer


def main():
    import torch.distributed as dist

    import shardwright as sw
    from shardwright.integrations.hugging_face import PlannedTrainer
    from shardwright.train.checkpoint.export import full_state_dict

    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    options = {"plan": sw.Plan.load(sys.argv[3])} if sys.argv[3:] else {"machine": "2xcpu"}
    resume = any((folder / "run").glob("checkpoint-*"))

    def read(module):
        return copy.deepcopy(full_state_dict(module, gpt2()))  # it may share memory with parameters

    history, weights, trainer = run(folder, stop, PlannedTrainer, resume, read, **options)
    trainer.save_model(str(folder / "saved"))
    best = read(trainer.model)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "final.pt")
        torch.save(best, folder / "best.pt")
        (folder / "history.json").write_text(json.dumps(history))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
