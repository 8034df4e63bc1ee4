"""accelerate and transformers' Trainer: the keys that say a strategy."""

from __future__ import annotations

from typing import Any

from shardwright.frameworks.readers.accelerate import FSDP, PARALLEL
from shardwright.frameworks.writers.nearest import WHOLE, ConfigFacts, Nearest
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute
from shardwright.ir.strategy.strategy import Strategy

VERSION_2 = (f"{FSDP}version", f"{FSDP}reshard_after_forward")  # a file without them is of FSDP1
_CHILDREN = Recompute("children")
_WORD = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
_BOTH = ("optimizer", "parameters")


def _common(near: Nearest) -> None:
    """Replaces fields that neither framework has."""
    near.plain_order()
    near.fold("pp", "there are no pipelines; their devices shard data instead")
    near.change("experts are not split", ep=1, etp=None)
    near.fsdp2()


def _shards(strategy: Strategy) -> bool:
    return strategy.dp_shard * strategy.cp > 1


def _dtypes(near: Nearest, tf32: bool) -> None:
    """Dtypes; FSDP reduces gradients in that of the parameters, DDP in float32."""
    shards = _shards(near.strategy) or near.strategy.tp > 1  # tp is a part of FSDP's mesh
    known = {
        (narrow, narrow if shards else "float32", "float32", "float32"): f"mixed {word}"
        for narrow, word in (("bfloat16", "bf16"), ("float16", "fp16"))
    }
    known[WHOLE] = "float32"
    if tf32:
        known[("tf32", "float32", "float32", "float32")] = "float32 with TF32 products"
    near.dtypes(known, WHOLE)


def _offload(near: Nearest) -> None:
    if near.strategy.offload not in ((), _BOTH) or not _shards(near.strategy):
        offloaded = any(what in near.strategy.offload for what in _BOTH) and _shards(near.strategy)
        near.change(
            "FSDP keeps parameters and optimizer state on the host together, and no activations",
            offload=_BOTH if offloaded else (),
        )


def nearest_accelerate(strategy: Strategy, facts: ConfigFacts) -> tuple[Strategy, list[str]]:
    """The nearest strategy that accelerate expresses, and the reasons."""
    near = Nearest(strategy)
    _common(near)
    now = near.strategy
    if now.dp_replicate > 1 and now.dp_shard == 1 and now.tp * now.cp > 1:
        near.change(
            "replicas beside tp or cp need a dp_shard above 1; data is sharded instead",
            dp_replicate=1,
            dp_shard=now.dp_replicate,
        )
    near.one_of(
        "cp_style",
        ("all-gather", "ring-zigzag"),
        "all-gather",
        "Ulysses needs DeepSpeed; context parallelism gathers or rotates",
    )
    if near.strategy.tp > 1:
        near.change("tensor parallelism has no sequence parallelism", sequence_parallel=False)
        near.change("the loss is not split", loss="whole")
    near.one_of("loss", ("vocabulary-parallel", "whole"), "whole", "the loss is the model's")
    near.change(
        f"gradient accumulation stands in the script: Accelerator(gradient_accumulation_steps="
        f"{near.strategy.micro_batches})",
        micro_batches=1,
    )
    _offload(near)
    if _shards(near.strategy):
        kept = near.strategy.recompute in (NONE, _CHILDREN)
        near.recompute(kept, _CHILDREN, "FSDP2 recomputes every child of a layer by itself")
    else:
        near.change("recomputation without FSDP stands in the script", recompute=NONE)
    _dtypes(near, tf32=False)
    near.one_of(
        "fp8",
        (None, "delayed", "tensorwise"),
        "tensorwise",
        "float8 is TE's or torchao's tensorwise",
    )
    near.change("gathers in 8 bits are switched on in the script", fp8_gather=False)
    if near.strategy.fp8 is not None and near.strategy.param_dtype != "bfloat16":
        shards = _shards(near.strategy) or near.strategy.tp > 1
        narrow = "bfloat16" if shards else "float32"
        near.change("float8 needs bf16", param_dtype="bfloat16", reduce_dtype=narrow)
    return near.strategy, near.reasons


def accelerate_settings(strategy: Strategy, _facts: ConfigFacts) -> dict[str, Any]:
    """The keys of accelerate's YAML."""
    shards = _shards(strategy) or strategy.tp > 1
    devices = strategy.devices
    precision = "fp8" if strategy.fp8 else _WORD[str(strategy.param_dtype)]
    compiled = strategy.compile == "regional"
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if shards else "MULTI_GPU" if devices > 1 else "NO",
        "mixed_precision": precision,
        "num_machines": max(1, devices // 8) if devices % 8 == 0 else 1,
        "num_processes": devices,
        "fp8_config.backend": {"delayed": "TE", "tensorwise": "AO"}.get(str(strategy.fp8)),
        "dynamo_config.dynamo_backend": "INDUCTOR" if compiled else None,
        "dynamo_config.dynamo_use_regional_compilation": True if compiled else None,
    }
    if not shards:
        return found
    degrees = {"dp_replicate": strategy.dp_replicate, "dp_shard": strategy.dp_shard}
    degrees |= {"cp": strategy.cp, "tp": strategy.tp}
    ring = {"all-gather": "allgather", "ring-zigzag": "alltoall"}[strategy.cp_style]
    again = strategy.reshards if _shards(strategy) else True
    return {
        **found,
        f"{FSDP}version": 2,
        f"{FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{FSDP}reshard_after_forward": again,
        f"{FSDP}offload_params": bool(strategy.offload),
        f"{FSDP}activation_checkpointing": strategy.recompute == _CHILDREN,
        **{f"{PARALLEL}{axis}_size": degree for axis, degree in degrees.items()},
        f"{PARALLEL}cp_comm_strategy": ring if strategy.cp > 1 else None,
    }


def nearest_trainer(strategy: Strategy, facts: ConfigFacts) -> tuple[Strategy, list[str]]:
    """The nearest strategy that TrainingArguments express, and the reasons."""
    near = Nearest(strategy)
    _common(near)
    for axis, what in (("tp", "tensor"), ("cp", "context")):
        near.fold(
            axis,
            f"{what} parallelism is given to from_pretrained or Accelerator, not to"
            " TrainingArguments; its devices shard data instead",
        )
    now = near.strategy
    if now.dp_replicate > 1 and now.dp_shard > 1:
        near.fold("dp_replicate", "one kind of data parallelism is given; all devices shard")
    near.one_of("loss", ("vocabulary-parallel", "fused"), "whole", "the loss is whole, or Liger's")
    near.change("gradients are reduced after the last micro-batch", gradient_sync="last")
    _offload(near)
    shards = _shards(near.strategy)
    kept = (NONE, FULL, _CHILDREN) if shards else (NONE, FULL)
    near.recompute(near.strategy.recompute in kept, FULL, "whole layers are recomputed")
    _dtypes(near, tf32=True)
    near.change("8-bit products are not given here", fp8=None)
    near.fit_batch(facts.batch)
    return near.strategy, near.reasons


def trainer_settings(strategy: Strategy, facts: ConfigFacts) -> dict[str, Any]:
    """The keys of TrainingArguments."""
    ranks = strategy.dp_replicate * strategy.dp_shard
    samples = facts.batch.samples or 0
    found: dict[str, Any] = {
        "per_device_train_batch_size": samples // (ranks * strategy.micro_batches),
        "gradient_accumulation_steps": strategy.micro_batches,
        "bf16": strategy.param_dtype == "bfloat16",
        "fp16": strategy.param_dtype == "float16",
        "tf32": True if strategy.param_dtype == "tf32" else None,
        "gradient_checkpointing": strategy.recompute == FULL,
        "torch_compile": strategy.compile == "regional",
        "use_liger_kernel": strategy.loss == "fused",
        "max_grad_norm": facts.clip,
    }
    if not _shards(strategy):
        return {**found, "fsdp": None}
    return {
        **found,
        "fsdp": True,
        "fsdp_config.version": 2,
        "fsdp_config.reshard_after_forward": strategy.reshards,
        "fsdp_config.cpu_offload": bool(strategy.offload),
        "fsdp_config.activation_checkpointing": strategy.recompute == _CHILDREN,
    }
