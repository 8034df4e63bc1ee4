"""torchtune: YAML of its distributed recipes."""

from __future__ import annotations

from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers.understood import (
    STEP,
    WHOLE,
    Given,
    Understood,
    devices_of,
    rest_of,
)
from shardwright.frameworks.settings import Settings
from shardwright.ir.strategy.recompute import FULL, NONE

DIALECT = "YAML"


def recognises(document: Document) -> bool:
    """Whether a file is torchtune's: its components are named by their paths."""
    component = (
        str(document.entries["model._component_"].value)
        if ("model._component_" in document.entries)
        else ""
    )
    return document.form == "yaml" and component.startswith("torchtune.")


def settings_of(document: Document) -> Settings:
    """The keys as they are."""
    return Settings(document)


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of a torchtune config."""
    settings.unaffecting(
        settings.below("optimizer"), "the optimizer changes memory, not the strategy"
    )
    devices = devices_of(settings, given, "devices", None)
    tp = settings.integer("tensor_parallel_dim", 1, "tp")
    cp = settings.integer("context_parallel_dim", 1, "cp", "cp_style")
    replicas = settings.integer("data_parallel_replicate_dim", 1, "dp_replicate")
    shards = settings.integer("data_parallel_shard_dim", -1, "dp_shard", least=-1)
    others = {
        "tensor_parallel_dim": tp,
        "context_parallel_dim": cp,
        "data_parallel_replicate_dim": replicas,
    }
    rest = rest_of(settings, devices, others)
    settings.require(
        shards in (-1, rest), "data_parallel_shard_dim", f"-1 or the {rest} ranks left are needed"
    )
    micro = settings.integer("batch_size", 1, "batch")
    steps = settings.integer("gradient_accumulation_steps", 1, "batch", "micro_batches")
    words = {"bf16": "bfloat16", "fp32": "float32"}
    dtype = settings.word("dtype", "bfloat16", words, "param_dtype", "state_dtype")
    offloads = settings.switch("fsdp_cpu_offload", False, "offload")
    activations = settings.switch("enable_activation_offloading", False, "offload")
    if settings.switch("optimizer_in_bwd", False):
        settings.differ(
            "optimizer_in_bwd", "updates run inside of the backward pass; read as behind it"
        )
    recomputed = settings.switch("enable_activation_checkpointing", False, "recompute")
    fields: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "cp_style": "all-gather",
        "dp_replicate": replicas,
        "dp_shard": rest,
        "sequence_parallel": False,
        "reshard_after_forward": settings.switch(
            "fsdp_reshard_after_forward", True, "reshard_after_forward"
        ),
        "micro_batches": steps,
        "recompute": FULL if recomputed else NONE,
        "offload": (("activations",) if activations else ())
        + (("optimizer", "parameters") if offloads else ()),
        **dict.fromkeys(WHOLE, dtype),
        "compile": "regional" if settings.raw("compile", "compile") is True else "off",
        "loss": _loss(settings),
        "gradient_sync": "every",
    }
    return Understood(
        dialect=DIALECT,
        fields=fields,
        batch=Batch(
            samples=micro * steps * replicas * rest,
            micro=micro,
            sequence=settings.integer("tokenizer.max_seq_len", None, "batch"),
        ),
        model=ModelHints(name=settings.text("model._component_", None, "model")),
        loss_mean=STEP,
        clip=settings.number("clip_grad_norm", None, "semantics"),
    )


def _loss(settings: Settings) -> str:
    named = settings.text("loss._component_", "", "loss")
    chunks = settings.integer("loss.num_output_chunks", 8, "loss")
    return f"chunked({chunks})" if "Chunked" in named or "LinearCrossEntropy" in named else "whole"
