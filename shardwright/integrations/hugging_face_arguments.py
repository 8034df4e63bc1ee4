"""Arguments of a Trainer: those that a plan decides are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from shardwright.ir.plan import PlanError
from shardwright.train.data.randomness import random_states, set_random_states

_REFUSED: Mapping[str, str] = {
    "fp16": "plan for bf16=True, which needs no scaled loss",
    "fp16_full_eval": "evaluation computes as the plan does",
    "bf16_full_eval": "evaluation computes as the plan does",
    "fsdp": "the plan says what is sharded",
    "deepspeed": "the plan says what is sharded",
    "parallelism_config": "the plan says what is sharded",
    "gradient_checkpointing": "the plan says what is recomputed",
    "activation_checkpointing": "the plan says what is recomputed",
    "torch_compile": "plan with the strategy's compile=regional",
    "neftune_noise_alpha": "add the noise in the model's forward",
    "label_smoothing_factor": "compute such a loss in the model's forward",
    "auto_find_batch_size": "the plan is for one batch",
}


def check_arguments(model: nn.Module, args: TrainingArguments, more: Collection[str]) -> None:
    """Raise `PlanError` for an argument that a plan decides, or by which results would differ.

    `more` are the names of further arguments of the Trainer.
    """
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise PlanError(f"{name} does not go with a plan: {instead}")
    if given := {"model_init", "compute_loss_func"}.intersection(more):
        raise PlanError(f"{min(given)} does not go with a plan: give a model that has its loss")
    if args.load_best_model_at_end and args.save_only_model:
        raise PlanError("load_best_model_at_end needs whole checkpoints: save_only_model=False")
    routed = getattr(getattr(model, "config", None), "output_router_logits", False)
    if args.gradient_accumulation_steps > 1 and routed:
        raise PlanError(
            "with output_router_logits the loss is no mean over labels, by which batches of an"
            " update are weighted; use gradient_accumulation_steps=1"
        )


def planned_arguments(args: TrainingArguments, outputs: str) -> TrainingArguments:
    """A copy of `args` by which Trainer and accelerate leave to the plan what it decides."""
    found = copy.copy(args)
    found.mixed_precision = "no"  # casts are operators of the plan
    found.accelerator_config = copy.copy(args.accelerator_config)
    found.accelerator_config.dispatch_batches = False  # by which the first process reads for all
    found.prediction_loss_only = args.prediction_loss_only or outputs == "loss"
    return found


def planning_options(
    args: TrainingArguments, kind: type[torch.optim.Optimizer], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The optimizer, of a class and arguments, and the precision to plan for."""
    fused = kind is torch.optim.AdamW and values.get("fused")
    precision = "bf16" if args.bf16 else "model"
    return {"optimizer": "adamw_fused" if fused else kind, "precision": precision}


def first_batch(loader: Callable[[], Iterable[Mapping[str, Any]]]) -> dict[str, Any]:
    """The first batch of a loader that is made for it, without a change of random numbers."""
    before = random_states()
    try:
        return dict(next(iter(loader())))
    finally:
        set_random_states(before)
