"""transformers' `TrainingArguments` as JSON, YAML or a command line; LLaMA-Factory's keys too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers import accelerate, deepspeed
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
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute

DIALECT = "TrainingArguments"
MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
FSDP, DEEPSPEED = "fsdp_config.", "deepspeed."
KNOWN = (MICRO, "fsdp_config", "per_device_eval_batch_size", "gradient_checkpointing")
_UNAFFECTING = {
    "the optimizer changes memory, not the strategy": "optim optim_args",
    "training, not the strategy": (
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type"
        " lr_scheduler_kwargs warmup_steps warmup_ratio num_train_epochs max_steps seed data_seed"
        " output_dir logging_dir logging_steps logging_strategy report_to run_name save_strategy"
        " save_steps save_total_limit save_only_model eval_strategy eval_steps do_train do_eval"
        " per_device_eval_batch_size dataloader_num_workers remove_unused_columns"
    ),
}
_LEGACY = {  # words of `fsdp` -> stage, whether parameters are freed, whether inside of hosts
    "full_shard": (3, True, False),
    "shard_grad_op": (3, False, False),
    "no_shard": (0, None, False),
    "hybrid_shard": (3, True, True),
    "hybrid_shard_zero2": (3, False, True),
}


def recognises(document: Document) -> bool:
    """Whether a file holds TrainingArguments."""
    return any(document.section(name) for name in KNOWN)


def settings_of(document: Document) -> Settings:
    """The keys as they are, without the prefix `fsdp_` inside of `fsdp_config`."""
    return renamed(document, {"torch_dtype": "dtype"})


def renamed(document: Document, names: Mapping[str, str]) -> Settings:
    """The keys of a document without the prefix `fsdp_`, some under other `names`."""

    def named(key: str) -> str:
        if key.startswith(FSDP):
            return FSDP + key.removeprefix(FSDP).removeprefix("fsdp_")
        return names.get(key, key)

    return Settings(document, named, absent=("auto",))


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of TrainingArguments."""
    return understood(settings, given, DIALECT, checkpoints=False)


def understood(settings: Settings, given: Given, dialect: str, checkpoints: bool) -> Understood:
    """The strategy of TrainingArguments; `checkpoints` is the default of gradient checkpointing."""
    for why, names in _UNAFFECTING.items():
        settings.unaffecting(names.split(), why)
    devices = devices_of(settings, given, "devices", settings.integer("$NGPU", None))
    micro = settings.integer(MICRO, 8, "batch")
    steps = settings.integer(STEPS, 1, "batch", "micro_batches")
    batch = Batch()
    fields: dict[str, Any]
    if _deepspeed(settings, given):
        prefix = DEEPSPEED
        section, batch = deepspeed.section(settings, prefix, devices, micro)
        fields = dict(section)
        if not any(f"{prefix}{name}" in settings for name in (STEPS, "train_batch_size")):
            fields["micro_batches"], batch = steps, Batch()
        if f"{prefix}bf16.enabled" not in settings and f"{prefix}fp16.enabled" not in settings:
            dtypes = _dtypes(settings, sharded=True)
            if dtypes["param_dtype"] not in ("float32", "tf32"):
                dtypes["grad_dtype"] = dtypes["param_dtype"]
            fields |= dtypes
    else:
        fields = {**_sharding(settings, given, devices), "micro_batches": steps}
    ranks = fields.get("dp_replicate", 1) * fields.get("dp_shard", 1)
    samples = micro * ranks * fields["micro_batches"]
    sequence = _sequence(settings)
    recomputed = _checkpointing(settings, checkpoints)
    if recomputed != NONE:
        fields["recompute"] = recomputed
    whole = settings.switch("average_tokens_across_devices", True, "semantics")
    if not whole:
        settings.notes.append("the loss is a mean over the tokens of each device, then of devices")
    return Understood(
        dialect=dialect,
        fields={
            **fields,
            "compile": _compiled(settings),
            "loss": "fused" if settings.switch("use_liger_kernel", False, "loss") else "whole",
        },
        batch=Batch(
            samples=batch.samples or samples, micro=batch.micro or micro, sequence=sequence
        ),
        model=_model(settings),
        loss_mean=STEP,
        clip=settings.number("max_grad_norm", 1.0, "semantics") or None,
    )


def _deepspeed(settings: Settings, given: Given) -> bool:
    """Whether DeepSpeed is used; reads the file that the config names."""
    if settings.below("deepspeed"):
        return True
    file = settings.text("deepspeed", None, "zero")
    if file is None:
        return False
    settings.attach(given.companion(file), "deepspeed")
    return True


def _sharding(settings: Settings, given: Given, devices: int) -> dict[str, Any]:
    """FSDP, or replicas, over what tensor and context parallelism leave."""
    mode = settings.raw("fsdp", "zero")
    file = settings.raw("fsdp_config", "zero")
    if isinstance(file, str):
        settings.attach(given.companion(file), "fsdp_config")
    on = mode not in (None, False, "", "false", [])
    # A version of transformers before 5 has FSDP1 by default, and names it by the old words.
    legacy = isinstance(mode, str | list) and str(mode).lower() != "true"
    version = settings.integer(f"{FSDP}version", 1 if legacy else 2, "zero")
    found = accelerate.degrees(settings, devices, "parallelism_config.") or _native(
        settings, devices
    )
    if not on and (found is None or found["dp_shard"] * found["cp"] == 1):
        plain = found or {"dp_replicate": devices, "sequence_parallel": False}
        return {**plain, "gradient_sync": "last", **_dtypes(settings, sharded=False)}
    storage = accelerate.reshard(settings, FSDP, version)
    words = mode.split() if isinstance(mode, str) else mode if isinstance(mode, list) else []
    for word in words:
        if word in _LEGACY:
            zero, again, hybrid = _LEGACY[word]
            storage = {"zero": zero, "reshard_after_forward": again, "hybrid": hybrid}
    hybrid = storage.pop("hybrid")
    if hybrid and found is None:
        settings.refuse("fsdp", "the number of hosts is needed; give a parallelism_config instead")
    none = storage["zero"] == 0
    plain = {"dp_replicate": devices if none else 1, "dp_shard": 1 if none else devices}
    kept = "offload" in words or settings.switch(f"{FSDP}cpu_offload", False, "offload")
    return {
        "sequence_parallel": False,
        **(found or plain),
        **storage,
        "offload": ("optimizer", "parameters") if kept else (),
        "recompute": accelerate.checkpointing(settings, f"{FSDP}activation_checkpointing", version),
        "gradient_sync": "last",
        **_dtypes(settings, sharded=True),
    }


def _native(settings: Settings, devices: int) -> dict[str, Any] | None:
    """The degrees of transformers' `DistributedConfig`."""
    prefix = "distributed_config."
    if not settings.below("distributed_config"):
        return None
    tp = settings.integer(f"{prefix}tp_size", 1, "tp")
    ep = settings.integer(f"{prefix}ep_size", 1, "ep")
    pp = settings.integer(f"{prefix}pp_size", 1, "pp")
    replicas = settings.integer(f"{prefix}dp_replicate_size", 1, "dp_replicate")
    others = {
        f"{prefix}tp_size": tp,
        f"{prefix}pp_size": pp,
        f"{prefix}dp_replicate_size": replicas,
    }
    rest = rest_of(settings, devices, others)
    shards = settings.integer(f"{prefix}fsdp_size", rest, "dp_shard")
    settings.require(
        shards == rest, f"{prefix}fsdp_size", f"the {rest} ranks that are left are needed"
    )
    return {
        "dp_replicate": replicas,
        "dp_shard": shards,
        "cp": 1,
        "tp": tp,
        "ep": ep,
        "pp": pp,
        "sequence_parallel": False,
    }


def _checkpointing(settings: Settings, default: bool) -> Recompute:
    name = "activation_checkpointing"
    old = settings.switch("gradient_checkpointing", default, "recompute")
    return FULL if settings.switch(name, old, "recompute") else NONE


def _dtypes(settings: Settings, sharded: bool) -> dict[str, Any]:
    """Dtypes; under FSDP gradients are reduced in that of the parameters."""
    half = settings.switch("fp16", False, "param_dtype")
    brain = settings.switch("bf16", False, "param_dtype")
    pure = settings.switch("pure_bf16", False, "param_dtype", "state_dtype")
    if pure:
        return dict.fromkeys(WHOLE, "bfloat16")
    known = {"bfloat16": True, "float32": False, "auto": False}
    loaded = settings.word("dtype", False, known, "param_dtype", "state_dtype")
    if loaded and not half and not brain:
        return dict.fromkeys(WHOLE, "bfloat16")
    tf32 = settings.switch("tf32", False, "param_dtype")
    if not half and not brain:
        return {**WHOLE, "param_dtype": "tf32"} if tf32 else dict(WHOLE)
    settings.require(not (half and brain), "fp16", "fp16 or bf16 alone is needed")
    narrow = "float16" if half else "bfloat16"
    found = {**MIXED_BF16, "param_dtype": narrow}
    return {**found, "reduce_dtype": narrow} if sharded else found


def _compiled(settings: Settings) -> str:
    if not settings.switch("torch_compile", False, "compile"):
        return "off"
    settings.differ("torch_compile", "the whole model is compiled; read as its layers")
    return "regional"


def _sequence(settings: Settings) -> int | None:
    for name in ("max_length", "max_seq_length", "model_max_length", "cutoff_len", "block_size"):
        found = settings.integer(name, None, "batch")
        if found is not None:
            return found
    return None


def _model(settings: Settings) -> ModelHints:
    return ModelHints(name=settings.text("model_name_or_path", None, "model"))
