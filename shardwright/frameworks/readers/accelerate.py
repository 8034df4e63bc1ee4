"""accelerate: the YAML of `accelerate config`, with FSDP, DeepSpeed and Megatron-LM sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.frameworks.config import Batch
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers import deepspeed
from shardwright.frameworks.readers.understood import (
    MIXED_BF16,
    SCRIPT,
    WHOLE,
    Given,
    Understood,
    devices_of,
    rest_of,
)
from shardwright.frameworks.settings import Settings
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute

DIALECT = "YAML of accelerate config"
FSDP, PARALLEL = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
_DEEPSPEED, _MEGATRON = "deepspeed_config.", "megatron_lm_config.megatron_lm_"
_KINDS = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "MULTI_NPU")
_STAGE_KEYS = {  # keys of deepspeed_config -> those of DeepSpeed's own JSON
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}


_UNAFFECTING = {
    "the launch, not the strategy": (
        *("compute_environment", "debug", "main_training_function", "use_cpu", "num_machines"),
        *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
        *("downcast_bf16", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "gpu_ids"),
    ),
    "read as layers that are wrapped one by one": tuple(
        f"{FSDP}{name}" for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap")
    ),
    "when messages are sent, not the strategy": tuple(
        f"{FSDP}{name}" for name in ("backward_prefetch", "forward_prefetch")
    ),
    "how weights are loaded, saved and named": tuple(
        f"{FSDP}{name}"
        for name in (
            *("cpu_ram_efficient_loading", "state_dict_type", "sync_module_states"),
            "use_orig_params",
        )
    ),
}


def recognises(document: Document) -> bool:
    """Whether a file is accelerate's."""
    return document.form in ("yaml", "json") and "distributed_type" in document.entries


def settings_of(document: Document) -> Settings:
    """The keys as they are, those of DeepSpeed under its own names."""

    def named(key: str) -> str:
        if key.startswith(_DEEPSPEED):
            inner = key.removeprefix(_DEEPSPEED)
            return _DEEPSPEED + _STAGE_KEYS.get(inner, inner)
        return key

    return Settings(document, named, absent=("auto",))


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of an accelerate config; batch and model stand in the script."""
    for why, names in _UNAFFECTING.items():
        settings.unaffecting(names, why)
    kind = settings.word("distributed_type", "NO", {word: word for word in _KINDS}, "zero")
    in_file = settings.integer("num_processes", None, "dp_shard", least=-1)
    in_file = in_file if in_file is not None and in_file > 0 else None
    if kind == "NO" and in_file is None:
        in_file = 1
    devices = devices_of(settings, given, "num_processes", in_file)
    batch = Batch()
    if kind == "DEEPSPEED":
        fields, batch = _deepspeed(settings, given, devices)
    elif kind == "MEGATRON_LM":
        fields = _megatron(settings, devices)
    elif kind == "FSDP":
        fields = {**_fsdp(settings, devices), **dtypes(settings, sharded=True)}
    else:
        fields = {**_replicas(settings, devices), **dtypes(settings, sharded=False)}
    clip = settings.number(f"{_DEEPSPEED}gradient_clipping", None, "semantics")
    clip = settings.number(f"{_MEGATRON}gradient_clipping", clip, "semantics")
    if kind not in ("DEEPSPEED", "MEGATRON_LM"):
        settings.notes.append(
            "accelerate's config says nothing of batch, sequence length, accumulation and clipping:"
            " they stand in the script; read as one micro-batch"
        )
    return Understood(
        dialect=DIALECT,
        fields={"loss": "whole", "compile": compiled(settings), **fields},
        batch=batch,
        loss_mean=SCRIPT,
        clip=clip or None,
    )


def degrees(settings: Settings, devices: int, prefix: str) -> dict[str, Any] | None:
    """The degrees of accelerate's `ParallelismConfig`; None where there is none."""
    names = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size")
    if not any(f"{prefix}{name}" in settings for name in names):
        return None
    replicas, shards, cp, sp, tp = (
        settings.integer(f"{prefix}{name}", 1, name.removesuffix("_size")) for name in names
    )
    settings.require(cp == 1 or sp == 1, f"{prefix}cp_size", "cp_size or sp_size of 1 is needed")
    product = replicas * shards * cp * sp * tp
    settings.require(
        product == devices,
        f"{prefix}{_largest(settings, prefix, names)}",
        f"sizes whose product is the {devices} processes are needed, not {product}",
    )
    if replicas > 1 and (tp > 1 or cp > 1):
        name = f"{prefix}dp_shard_size" if f"{prefix}dp_shard_size" in settings else ""
        name = name or f"{prefix}dp_replicate_size"
        settings.require(shards > 1, name, "tp and cp beside replicas need a dp_shard_size above 1")
    ring = {"allgather": "all-gather", "alltoall": "ring-zigzag"}
    style = settings.word(f"{prefix}cp_comm_strategy", "all-gather", ring, "cp_style")
    if sp > 1:
        settings.text(f"{prefix}sp_backend", "deepspeed", "cp_style")
    return {
        "dp_replicate": replicas,
        "dp_shard": shards,
        "cp": cp * sp,
        "tp": tp,
        "cp_style": "ulysses" if sp > 1 else style,
        "sequence_parallel": False,
    }


def _largest(settings: Settings, prefix: str, names: tuple[str, ...]) -> str:
    return next(name for name in names if f"{prefix}{name}" in settings)


def _replicas(settings: Settings, devices: int) -> dict[str, Any]:
    found = degrees(settings, devices, PARALLEL)
    if found is not None and found["dp_shard"] > 1:
        settings.refuse(f"{PARALLEL}dp_shard_size", "distributed_type FSDP is needed")
    return {
        "sequence_parallel": False,
        **(found or {"dp_replicate": devices}),
        "gradient_sync": "last",
    }


def _fsdp(settings: Settings, devices: int) -> dict[str, Any]:
    version = settings.integer(f"{FSDP}version", 1, "zero")
    found = degrees(settings, devices, PARALLEL)
    if found is not None and version == 1:
        settings.refuse(f"{FSDP}version", "a parallelism_config needs fsdp_version: 2")
    storage = reshard(settings, FSDP, version)
    hybrid = storage.pop("hybrid")
    if version == 2 and storage["reshard_after_forward"]:
        settings.notes.append("norm and lm_head stay gathered after the forward pass")
    replicas = settings.integer("num_machines", 1, "dp_replicate") if hybrid else 1
    none = storage["zero"] == 0
    shards = rest_of(settings, devices, {"num_machines": replicas})
    plain = {"dp_replicate": devices if none else replicas, "dp_shard": 1 if none else shards}
    kept = settings.switch(f"{FSDP}offload_params", False, "offload")
    return {
        "sequence_parallel": False,
        **(found or plain),
        **storage,
        "offload": ("optimizer", "parameters") if kept else (),
        "recompute": checkpointing(settings, f"{FSDP}activation_checkpointing", version),
        "gradient_sync": "last",
    }


def checkpointing(settings: Settings, name: str, version: int) -> Recompute:
    """Modules that FSDP's activation checkpointing wraps: in version 2 every child of a layer."""
    if not settings.switch(name, False, "recompute"):
        return NONE
    return Recompute("children") if version == 2 else FULL


def reshard(settings: Settings, prefix: str, version: int) -> dict[str, Any]:
    """Sharding of FSDP and when it frees; `hybrid`: only inside of hosts."""
    words = {
        "FULL_SHARD": (3, True, False),
        "SHARD_GRAD_OP": (3, False, False),
        "HYBRID_SHARD": (3, True, True),
        "HYBRID_SHARD_ZERO2": (3, False, True),
        "NO_SHARD": (0, None, False),
        **{
            str(number + 1): kind
            for number, kind in enumerate(((3, True, False), (3, False, False)))
        },
        "3": (0, None, False),
        "4": (3, True, True),
        "5": (3, False, True),
        "true": (3, True, False),
        "false": (3, False, False),
    }
    default = (3, True, False)
    chosen = settings.word(
        f"{prefix}reshard_after_forward", default, words, "reshard_after_forward", "zero"
    )
    if version == 1:
        old = f"{prefix}sharding_strategy"
        chosen = settings.word(old, chosen, words, "reshard_after_forward", "zero")
    zero, again, hybrid = chosen
    return {"zero": zero, "reshard_after_forward": again, "hybrid": hybrid}


def dtypes(settings: Settings, sharded: bool) -> dict[str, Any]:
    """Dtypes; under FSDP gradients are reduced in that of the parameters."""
    word = settings.word(
        "mixed_precision",
        "no",
        {"no": "no", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"},
        "param_dtype",
        "reduce_dtype",
    )
    if word == "no":
        return dict(WHOLE)
    narrow = "float16" if word == "fp16" else "bfloat16"
    found: dict[str, Any] = {**MIXED_BF16, "param_dtype": narrow}
    if sharded:
        found["reduce_dtype"] = narrow
    if word == "fp8":
        found["fp8"] = _fp8(settings)
    return found


def _fp8(settings: Settings) -> str:
    name = "fp8_config.backend"
    backend = settings.word(
        name, "TE", {"TE": "TE", "AO": "AO", "TORCHAO": "AO", "MSAMP": "MSAMP"}, "fp8"
    )
    if backend == "MSAMP":
        settings.differ(name, "the optimizer's state is in 8 bits too; read as products alone")
    if backend == "AO":
        return "rowwise" if settings.switch("fp8_config.rowwise", False, "fp8") else "tensorwise"
    return "delayed"


def compiled(settings: Settings) -> str:
    """Whether layers are compiled, or the whole model, which is read as layers."""
    name = "dynamo_config.dynamo_backend"
    backend = settings.text(name, "NO", "compile")
    if backend.upper() == "NO":
        return "off"
    if not settings.switch("dynamo_config.dynamo_use_regional_compilation", False, "compile"):
        settings.differ(name, "the whole model is compiled; read as its layers")
    return "regional"


def _deepspeed(settings: Settings, given: Given, devices: int) -> tuple[Mapping[str, Any], Batch]:
    name = f"{_DEEPSPEED}deepspeed_config_file"
    file = settings.text(name, None, "zero")
    if file is not None:
        settings.attach(given.companion(file), "deepspeed_config.file")
        return deepspeed.section(settings, "deepspeed_config.file.", devices)
    fields, batch = deepspeed.section(settings, _DEEPSPEED, devices)
    precision = dtypes(settings, sharded=True)
    if precision["param_dtype"] != "float32":
        precision["grad_dtype"] = precision["param_dtype"]
    return {**fields, **precision}, batch


def _megatron(settings: Settings, devices: int) -> dict[str, Any]:
    tp = settings.integer(f"{_MEGATRON}tp_degree", 1, "tp")
    pp = settings.integer(f"{_MEGATRON}pp_degree", 1, "pp")
    dp = rest_of(settings, devices, {f"{_MEGATRON}tp_degree": tp, f"{_MEGATRON}pp_degree": pp})
    shards = settings.switch(f"{_MEGATRON}use_distributed_optimizer", False, "zero")
    some = settings.switch(f"{_MEGATRON}recompute_activations", False, "recompute")
    return {
        "tp": tp,
        "pp": pp,
        "dp_replicate": 1 if shards else dp,
        "dp_shard": dp if shards else 1,
        "zero": 1 if shards else 0,
        "sequence_parallel": settings.switch(
            f"{_MEGATRON}sequence_parallelism", False, "sequence_parallel"
        ),
        "micro_batches": settings.integer(f"{_MEGATRON}num_micro_batches", 1, "micro_batches"),
        "recompute": Recompute("modules", names=("core_attn",)) if some else NONE,
        "loss": "vocabulary-parallel",
        "gradient_sync": "last",
        **dtypes(settings, sharded=False),
    }
