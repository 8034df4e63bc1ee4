"""axolotl: YAML with degrees of its own, FSDP without prefixes, or a DeepSpeed file."""

from __future__ import annotations

from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers import accelerate, deepspeed
from shardwright.frameworks.readers.trainer import renamed
from shardwright.frameworks.readers.understood import (
    MIXED_BF16,
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
_FSDP = "fsdp_config."
_SIZES = ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size")


def recognises(document: Document) -> bool:
    """Whether a file is axolotl's."""
    return document.form == "yaml" and "base_model" in document.entries


def settings_of(document: Document) -> Settings:
    """The keys as they are; inside of `fsdp_config` without the prefix of old files."""
    return renamed(document, {"sequence_parallel_degree": "context_parallel_size"})


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of an axolotl config."""
    settings.unaffecting(["optimizer"], "the optimizer changes memory, not the strategy")
    settings.unaffecting(
        ["learning_rate", "lr_scheduler", "num_epochs", "max_steps", "output_dir", "seed"],
        "training, not the strategy",
    )
    devices = devices_of(settings, given, "devices", None)
    micro = settings.integer("micro_batch_size", 1, "batch")
    steps = settings.integer("gradient_accumulation_steps", 1, "batch", "micro_batches")
    if "deepspeed" in settings:
        settings.attach(given.companion(settings.text("deepspeed", "", "zero")), "deepspeed")
        section, _ = deepspeed.section(settings, "deepspeed.", devices, micro)
        fields = {**section, "micro_batches": steps, **_dtypes(settings, narrow_grads=True)}
    else:
        fields = {**_fsdp(settings, devices), "micro_batches": steps}
    recomputed = settings.raw("gradient_checkpointing", "recompute")
    if recomputed not in (None, False, "false"):
        fields["recompute"] = FULL
    offloaded = settings.raw("activation_offloading", "offload")
    if offloaded not in (None, False, "false"):
        kept = fields.get("offload", ())
        fields["offload"] = ("activations", *kept)
    ranks = fields.get("dp_replicate", 1) * fields.get("dp_shard", 1)
    if fields.get("ep", 1) > 1:
        settings.notes.append(
            "expert parallelism's ranks hold different data, so they are counted in dp_shard"
        )
    compiled = settings.raw("torch_compile", "compile") in (True, "true", "auto")
    if compiled:
        settings.differ("torch_compile", "the whole model is compiled; read as its layers")
    plugins = " ".join(settings.words("plugins", "loss"))
    fused = "cut_cross_entropy" in plugins or any(
        settings.switch(name, False, "loss")
        for name in ("cut_cross_entropy", "liger_fused_linear_cross_entropy")
    )
    return Understood(
        dialect=DIALECT,
        fields={
            **fields,
            "compile": "regional" if compiled else "off",
            "loss": "fused" if fused else "whole",
            "gradient_sync": fields.get("gradient_sync", "last"),
        },
        batch=Batch(
            samples=micro * steps * ranks,
            micro=micro,
            sequence=settings.integer("sequence_len", None, "batch"),
        ),
        model=ModelHints(name=settings.text("base_model", None, "model")),
        loss_mean=STEP,
        clip=settings.number("max_grad_norm", 1.0, "semantics") or None,
    )


def _fsdp(settings: Settings, devices: int) -> dict[str, Any]:
    """Degrees and sharding; the dense part is sharded over shards, experts and context."""
    tp = settings.integer("tensor_parallel_size", 1, "tp")
    cp = settings.integer("context_parallel_size", 1, "cp", "cp_style")
    ep = settings.integer("expert_parallel_size", 1, "ep")
    replicas = settings.integer("dp_replicate_size", 1, "dp_replicate")
    settings.require(tp == 1 or ep == 1, "expert_parallel_size", "no tensor parallelism is needed")
    others = {
        "tensor_parallel_size": tp,
        "context_parallel_size": cp,
        "expert_parallel_size": ep,
        "dp_replicate_size": replicas,
    }
    rest = rest_of(settings, devices, others)
    sharded = "fsdp_version" in settings or settings.below("fsdp_config") or "fsdp" in settings
    shards = settings.integer("dp_shard_size", rest if sharded else 1, "dp_shard")
    common = {
        "tp": tp,
        "cp": cp,
        "ep": ep,
        "cp_style": "ring-zigzag",
        "sequence_parallel": False,
    }
    if shards * cp * ep == 1 and not sharded:
        replicas = rest * replicas
        return {**common, "dp_replicate": replicas, **_dtypes(settings, narrow_grads=False)}
    settings.require(
        shards == rest,
        next((name for name in ("dp_shard_size", *_SIZES) if name in settings), "dp_shard_size"),
        f"sizes whose product is the {devices} devices are needed",
    )
    settings.raw("fsdp", "zero")
    version = settings.integer("fsdp_version", 1, "zero")
    storage = accelerate.reshard(settings, _FSDP, version)
    storage.pop("hybrid")
    kept = settings.switch(f"{_FSDP}offload_params", False, "offload")
    kept = settings.switch(f"{_FSDP}cpu_offload", kept, "offload")
    recomputed = accelerate.checkpointing(settings, f"{_FSDP}activation_checkpointing", version)
    dtypes = _dtypes(settings, narrow_grads=False)
    if dtypes["param_dtype"] != "float32":
        dtypes["reduce_dtype"] = dtypes["param_dtype"]
    return {
        **common,
        "dp_replicate": replicas,
        "dp_shard": shards * ep,
        **storage,
        "offload": ("optimizer", "parameters") if kept else (),
        "recompute": recomputed if recomputed != NONE else NONE,
        "gradient_sync": "last",
        **dtypes,
    }


def _dtypes(settings: Settings, narrow_grads: bool) -> dict[str, str]:
    brain = settings.raw("bf16", "param_dtype") in (True, "true", "full")
    if settings.raw("fp16", "param_dtype") in (True, "true") and not brain:
        narrow = "float16"
    else:
        narrow = "bfloat16" if brain else ""
    if not narrow:
        if (
            settings.document.entries.get("bf16")
            and settings.document.entries["bf16"].value == "auto"
        ):
            narrow = "bfloat16"
            settings.notes.append("bf16 is auto: read as on, as on devices that have it")
        else:
            return dict(WHOLE)
    found = {**MIXED_BF16, "param_dtype": narrow}
    return {**found, "reduce_dtype": narrow, "grad_dtype": narrow} if narrow_grads else found
