"""LLaMA-Factory: TrainingArguments with further keys, and gradient checkpointing by default."""

from __future__ import annotations

from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers import megatron, trainer
from shardwright.frameworks.readers.understood import (
    MIXED_BF16,
    STEP,
    Given,
    Understood,
    devices_of,
    rest_of,
)
from shardwright.frameworks.settings import Settings
from shardwright.ir.strategy.recompute import FULL

ARGUMENTS, MEGATRON, V1 = "TrainingArguments", "Megatron variant", "v1 dist_config"
_KEYS = ("finetuning_type", "cutoff_len", "stage", "disable_gradient_checkpointing")


def recognises(document: Document) -> bool:
    """Whether a file is LLaMA-Factory's."""
    found = sum(key in document.entries for key in _KEYS)
    return document.form in ("yaml", "json") and (found >= 2 or document.section("dist_config"))


def settings_of(document: Document) -> Settings:
    """The keys as they are; of the Megatron variant, the names of Megatron-LM's flags."""
    if _is_megatron(document):
        return Settings(document, _flag)
    return trainer.settings_of(document)


def _flag(key: str) -> str:
    """The flag of Megatron-LM that means the same as a key of the variant."""
    known = {
        trainer.MICRO: "micro-batch-size",
        "cutoff_len": "seq-length",
        "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
        "max_grad_norm": "clip-grad",
    }
    return known.get(key, key.replace("_", "-"))


def _is_megatron(document: Document) -> bool:
    return any(key.endswith("model_parallel_size") for key in document.entries)


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of a LLaMA-Factory config."""
    if _is_megatron(settings.document):
        return _megatron(settings, given)
    if settings.below("dist_config"):
        return _v1(settings, given)
    enabled = not settings.switch("disable_gradient_checkpointing", False, "recompute")
    return trainer.understood(settings, given, ARGUMENTS, checkpoints=enabled)


def _megatron(settings: Settings, given: Given) -> Understood:
    """The Megatron variant: TrainingArguments' accumulation instead of a global batch."""
    found = megatron.understood(settings, given, MEGATRON, None)
    steps = settings.integer("gradient-accumulation-steps", 1, "batch", "micro_batches")
    ranks = found.fields["dp_replicate"] * found.fields["dp_shard"]
    batch = found.batch
    micro = batch.micro or 1
    return Understood(
        dialect=MEGATRON,
        fields={**found.fields, "micro_batches": steps},
        batch=Batch(samples=micro * ranks * steps, micro=micro, sequence=batch.sequence),
        model=ModelHints(name=settings.text("model-name-or-path", None, "model")),
        loss_mean=found.loss_mean,
        clip=found.clip,
    )


def _v1(settings: Settings, given: Given) -> Understood:
    """Version 1: a `dist_config` of FSDP2 with replicas and Ulysses."""
    devices = devices_of(settings, given, "devices", None)
    part = "dist_config."
    cp = settings.integer(f"{part}cp_size", 1, "cp")
    style = settings.word(f"{part}cp_mode", "ulysses", {"ulysses": "ulysses"}, "cp_style")
    replicas = settings.integer(f"{part}mp_replicate_size", 1, "dp_replicate")
    ep = settings.integer(f"{part}ep_size", 1, "ep")
    settings.text(f"{part}name", None, "zero")
    rest = rest_of(settings, devices, {f"{part}cp_size": cp, f"{part}mp_replicate_size": replicas})
    whole = settings.integer(f"{part}mp_shard_size", devices // replicas, "dp_shard")
    settings.require(
        whole == rest * cp, f"{part}mp_shard_size", f"the {rest * cp} ranks of a replica are needed"
    )
    micro = settings.integer("micro_batch_size", 1, "batch")
    samples = settings.integer("global_batch_size", micro * rest * replicas, "batch")
    fields: dict[str, Any] = {
        "dp_replicate": replicas,
        "dp_shard": rest,
        "cp": cp,
        "cp_style": style,
        "ep": ep,
        "micro_batches": max(1, samples // (micro * rest * replicas)),
        "recompute": FULL,
        **MIXED_BF16,
        "loss": "whole",
        "gradient_sync": "last",
    }
    return Understood(
        dialect=V1,
        fields=fields,
        batch=Batch(
            samples=samples, micro=micro, sequence=settings.integer("cutoff_len", None, "batch")
        ),
        model=ModelHints(name=settings.text("model", None, "model")),
        loss_mean=STEP,
        clip=settings.number("max_grad_norm", 1.0, "semantics") or None,
    )
