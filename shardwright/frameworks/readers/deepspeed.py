"""DeepSpeed's JSON, alone or as a section of another framework's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.frameworks.config import Batch
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers.understood import (
    MICRO,
    WHOLE,
    Given,
    Understood,
    devices_of,
    rest_of,
)
from shardwright.frameworks.settings import Settings

DIALECT = "JSON"
_TRAIN, _MICRO, _STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
KNOWN = ("zero_optimization", _MICRO, _TRAIN, "zero_allow_untested_optimizer")
_UNAFFECTING = (
    *("overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "contiguous_gradients"),
    *("allgather_partitions", "reduce_scatter", "round_robin_gradients", "sub_group_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    "stage3_gather_16bit_weights_on_model_save",
)


def recognises(document: Document) -> bool:
    """Whether a file is DeepSpeed's."""
    known = any(document.section(name) for name in KNOWN)
    return document.form in ("json", "yaml") and known


def settings_of(document: Document) -> Settings:
    """The keys as they are; "auto" stands for what is not given."""
    return Settings(document, absent=("auto",))


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of a DeepSpeed config."""
    devices = devices_of(settings, given, "devices", None)
    for name in ("optimizer", "scheduler"):
        settings.unaffecting(settings.below(name), "training, not the strategy")
    fields, batch = section(settings, "", devices)
    clip = settings.number("gradient_clipping", None, "semantics")
    left_open = settings.left_open()
    if clip is None and "gradient_clipping" not in left_open:
        settings.notes.append(
            "gradient_clipping is not given: DeepSpeed clips at 1.0 since 2026-06-23, and did not"
            " before"
        )
    if left_open:
        settings.notes.append(_open_note(left_open, fields))
    return Understood(
        dialect=DIALECT, fields=fields, batch=batch, loss_mean=MICRO, clip=clip or None
    )


def _open_note(names: tuple[str, ...], fields: Mapping[str, Any]) -> str:
    """Names the keys that the program fills in that runs DeepSpeed, and what is read instead."""
    dtype = fields["param_dtype"]
    precision = any(name in ("bf16.enabled", "fp16.enabled") for name in names)
    read_as = f"; the precision is read as {dtype}" if precision else ""
    return (
        f'"auto" is filled in by the program that calls DeepSpeed, and read as not given:'
        f" {', '.join(names)}{read_as}; write values to have them priced"
    )


def section(
    settings: Settings, prefix: str, devices: int, micro: int | None = None
) -> tuple[Mapping[str, Any], Batch]:
    """Fields and batch of the keys that begin with `prefix`, on so many devices.

    `micro` is the micro-batch where these keys leave it open.
    """
    zero = f"{prefix}zero_optimization"
    settings.unaffecting(
        (f"{zero}.{name}" for name in _UNAFFECTING),
        "sizes of buckets and when they are sent, not the strategy",
    )
    settings.unaffecting(
        (f"{prefix}{name}" for name in ("steps_per_print", "wall_clock_breakdown")),
        "training, not the strategy",
    )
    stage = settings.integer(f"{zero}.stage", 0, "zero", least=0)
    settings.require(stage <= 3, f"{zero}.stage", "0, 1, 2 or 3 is needed")
    tp_name, sp_name = f"{prefix}tensor_parallel.autotp_size", f"{prefix}sequence_parallel_size"
    tp = settings.integer(tp_name, 1, "tp", least=0) or 1
    sp = settings.integer(sp_name, 1, "cp", "cp_style")
    settings.require(tp == 1 or stage < 3, tp_name, "AutoTP needs ZeRO stage 0, 1 or 2")
    dp = rest_of(settings, devices, {tp_name: tp, sp_name: sp})
    if any(name.startswith(f"{prefix}pipeline.") for name in settings.below("pipeline")):
        settings.differences.append(
            "the number of pipeline stages stands in the program (PipelineModule); read as none"
        )
    batch, count = _batch(settings, prefix, dp, micro)
    return {
        "tp": tp,
        "cp": sp,
        "cp_style": "ulysses",
        "sequence_parallel": False,
        **_experts(settings, prefix),
        **_storage(settings, zero, stage, dp),
        "micro_batches": count,
        "offload": _offload(settings, zero, prefix),
        **_dtypes(settings, prefix),
        "compile": _compiled(settings, prefix),
        "loss": "whole",
        "gradient_sync": "every" if stage >= 2 else "last",
    }, batch


def _storage(settings: Settings, zero: str, stage: int, dp: int) -> dict[str, Any]:
    """Replicas and shards: MiCS shards inside of groups."""
    if stage == 0:
        return {"dp_replicate": dp, "dp_shard": 1, "zero": 0}
    name = f"{zero}.mics_shard_size"
    shards = settings.integer(name, -1, "dp_shard", "dp_replicate", least=-1)
    shards = dp if shards < 1 else shards
    settings.require(dp % shards == 0, name, f"a divisor of the {dp} data-parallel ranks is needed")
    if shards < dp:
        settings.notes.append("mics_shard_size: DeepSpeed has no MiCS since 0.19.8")
    partition = f"{zero}.zero_hpz_partition_size"
    if settings.integer(partition, 1, "dp_shard") > 1:
        settings.differ(
            partition, "a second copy of the parameters is sharded in groups; read as without"
        )
    for quantized in ("zero_quantized_weights", "zero_quantized_gradients"):
        if settings.switch(f"{zero}.{quantized}", False):
            settings.differ(f"{zero}.{quantized}", "messages are quantized; read as without")
    return {"dp_replicate": dp // shards, "dp_shard": shards, "zero": stage}


def _experts(settings: Settings, prefix: str) -> dict[str, Any]:
    name = f"{prefix}expert_parallel"
    if not settings.switch(f"{name}.enabled", False, "ep"):
        return {"ep": 1}
    ep = settings.integer(f"{name}.autoep_size", 1, "ep")
    etp = settings.integer(f"{name}.expert_tensor_parallel_size", 1, "etp")
    return {"ep": ep, "etp": etp if ep > 1 else None}


def _batch(settings: Settings, prefix: str, dp: int, micro: int | None) -> tuple[Batch, int]:
    """The batch, of any two of global batch, micro-batch and accumulation."""
    name = f"{prefix}{_TRAIN}"
    samples = settings.integer(name, None, "batch", "micro_batches")
    each = settings.integer(f"{prefix}{_MICRO}", micro, "batch", "micro_batches")
    steps = settings.integer(f"{prefix}{_STEPS}", None, "batch", "micro_batches")
    if samples is not None:
        ranks = dp * (each or 1) * (steps or 1)
        settings.require(
            samples % ranks == 0 and (each is None or steps is None or samples == ranks),
            name,
            f"micro-batch x accumulation x {dp} data-parallel ranks is needed",
        )
        if each is None:
            each = samples // (dp * (steps or 1))
        steps = samples // (dp * each)
    steps = steps or 1
    known = samples if samples is not None else each * steps * dp if each else None
    return Batch(samples=known, micro=each), steps


def _offload(settings: Settings, zero: str, prefix: str) -> tuple[str, ...]:
    """Parameters and state that are kept on the host."""
    found = []
    if settings.switch(f"{prefix}compile.offload_activation", False, "offload"):
        found.append("activations")
    for section_name, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        name = f"{zero}.{section_name}.device"
        kinds = {"cpu": "cpu", "nvme": "nvme", "none": ""}
        device = settings.word(name, "", kinds, "offload")
        ratio = f"{zero}.{section_name}.ratio"
        if device and settings.number(ratio, 1.0, "offload") < 1:
            settings.differ(ratio, "part of it is kept on the host; read as all")
        if device == "nvme":
            settings.differ(name, "kept on a disk; read as in the host's memory")
        if device:
            found.append(what)
    if "parameters" in found and "optimizer" not in found:
        name = f"{zero}.offload_param.device"
        settings.differ(name, "the host updates its parameters; read with their state there, too")
    return tuple(found)


def _dtypes(settings: Settings, prefix: str) -> dict[str, str]:
    """Dtypes: gradients are reduced and kept in that of the model unless they are given one."""
    words = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    words |= {name: name for name in words.values()}
    bf16 = f"{prefix}bf16.enabled"
    if settings.switch(bf16, False, "param_dtype"):
        model = "bfloat16"
    else:
        model = "float16" if settings.switch(f"{prefix}fp16.enabled", False, "param_dtype") else ""
    if not model:
        return dict(WHOLE)
    reduced = settings.word(f"{prefix}communication_data_type", model, words, "reduce_dtype")
    kept = settings.word(f"{prefix}data_types.grad_accum_dtype", model, words, "grad_dtype")
    masters = settings.switch(
        f"{prefix}bf16.bf16_master_weights_and_grads", False, "state_dtype", "grad_dtype"
    )
    if settings.switch(f"{prefix}bf16.bf16_optimizer_states", False, "state_dtype") and not masters:
        settings.differ(
            f"{prefix}bf16.bf16_optimizer_states", "master weights are float32; read as all float32"
        )
    return {
        "param_dtype": model,
        "reduce_dtype": reduced,
        "grad_dtype": kept,
        "state_dtype": "bfloat16" if masters else "float32",
    }


def _compiled(settings: Settings, prefix: str) -> str:
    if not settings.switch(f"{prefix}compile.deepcompile", False, "compile"):
        return "off"
    settings.differ(f"{prefix}compile.deepcompile", "the whole model is compiled; read as layers")
    return "regional"
