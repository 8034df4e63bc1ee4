"""Megatron-LM and Megatron-Bridge: the flags, or the keys, that say a strategy."""

from __future__ import annotations

from typing import Any

from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.readers.megatron_bridge import KEY_OF
from shardwright.frameworks.readers.megatron_options import CP_STYLES, MODULES, RECIPES, SHARDED
from shardwright.frameworks.readers.megatron_pipeline import layout_text
from shardwright.frameworks.writers.nearest import WHOLE, ConfigFacts, Nearest
from shardwright.ir.options.fp8 import GATHERABLE
from shardwright.ir.strategy.fields import AXES, TP_PP_DP
from shardwright.ir.strategy.recompute import FULL, Recompute
from shardwright.ir.strategy.strategy import Strategy

_NARROW = {"bfloat16": "bf16", "float16": "fp16"}
_DTYPES = {
    **{
        (param, summed, summed, "float32"): f"{word} with gradients in {summed}"
        for param, word in _NARROW.items()
        for summed in ("float32", "bfloat16")
    },
    WHOLE: "float32",
}
# Names of mixed precision say the dtype of gradients too, in place of what `ddp` says.
_BRIDGE_DTYPES = {
    ("bfloat16", "float32", "float32", "float32"): "bf16 with gradients in float32",
    ("float16", "float16", "float16", "float32"): "fp16 with gradients in float16",
}
_COMM = {style: word for word, style in reversed(CP_STYLES.items()) if "+" not in word}
_STRATEGY = {zero: word for word, zero in SHARDED.items()}
_FUSED = "vocabulary-parallel-fused"
_CORE = Recompute("modules", names=("core_attn",))
# Bridge's names of mixed precision, by recipe of fp8.
_MIXED = {
    None: "bf16_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


_BY_NAME = ("bf16", "fp16", "fp8-format", "fp8-recipe", "fp8-param-gather")  # which these say


def nearest(strategy: Strategy, facts: ConfigFacts, bridge: bool) -> tuple[Strategy, list[str]]:
    """The nearest strategy that Megatron-LM expresses, and the reasons."""
    near = Nearest(strategy)
    active = tuple(axis for axis, _ in near.strategy.axes)
    if active != tuple(axis for axis in TP_PP_DP if axis in active):
        near.plain_order()
    now = near.strategy
    if now.pp > 1 and now.order != AXES and now.ep * now.expert_tensor != now.tp * now.cp:
        near.change(
            "pipelines are outside of data parallelism unless etp x ep is tp x cp", order=AXES
        )
    near.schedule(("1F1B", "Interleaved1F1B"), "pipelines run 1F1B, interleaved or not")
    now = near.strategy
    if now.pp > 1 and now.schedule == "Interleaved1F1B" and now.virtual_stages == 1:
        near.change("one stage a rank is not interleaved", schedule="1F1B")
    _storage(near, bridge)
    _recompute(near)
    if near.strategy.offload not in ((), ("optimizer",)):
        offloaded = any(what in near.strategy.offload for what in ("optimizer", "parameters"))
        near.change(
            "only the optimizer's state is kept on the host as a whole",
            offload=("optimizer",) if offloaded else (),
        )
    if bridge:
        near.dtypes(_BRIDGE_DTYPES, next(iter(_BRIDGE_DTYPES)))
    else:
        near.dtypes(_DTYPES, WHOLE)
    near.one_of(
        "fp8", (None, *RECIPES), "tensorwise", "float8 is delayed, tensorwise, blockwise or mxfp8"
    )
    if near.strategy.fp8 and near.strategy.param_dtype != "bfloat16":
        sums = {"reduce_dtype": "float32", "grad_dtype": "float32"} if bridge else {}
        near.change("float8 needs bf16", param_dtype="bfloat16", **sums)
    now = near.strategy
    if bridge and not now.fp8_gather and now.fp8 in GATHERABLE:
        gathers = now.in_8_bit(now.fp8, gathers=True).fp8_gather
        near.change("names of mixed precision gather weights in 8 bits", fp8_gather=gathers)
    near.change("layers are not compiled as a whole", compile="off")
    if not _overlaps_experts(near.strategy):
        near.change(
            "messages of experts overlap in 16 bits, with interleaved stages or none, and no layer"
            " recomputed whole",
            ep_overlap=False,
        )
    near.one_of(
        "loss",
        ("vocabulary-parallel", _FUSED),
        "vocabulary-parallel",
        "the loss is always split over the vocabulary, and not in chunks",
    )
    near.fit_batch(facts.batch)
    return near.strategy, near.reasons


def _overlaps_experts(now: Strategy) -> bool:
    """Whether Megatron-LM accepts messages of experts beside another micro-batch."""
    parts = now.recompute.kind in ("none", "modules")
    return parts and (now.pp == 1 or now.virtual_stages > 1) and now.param_dtype in _NARROW


def _storage(near: Nearest, bridge: bool) -> None:
    """Megatron-FSDP for gradients and parameters, else the distributed optimizer."""
    now = near.strategy
    if now.dp_shard * now.cp == 1:
        near.change("gradients are reduced once a step", gradient_sync="last")
        return
    if now.zero == 3 and not now.reshards and (bridge or now.pp > 1):
        near.change("Megatron-FSDP gathers parameters again", reshard_after_forward=True)
    now = near.strategy
    every = now.zero >= 2
    if every and (now.reshards or now.zero == 2):
        near.change("Megatron-FSDP has pipelines outside of data parallelism", order=AXES)
    near.change(
        "gradients are reduced after every micro-batch where they are kept sharded, else after the"
        " last",
        gradient_sync="every" if every else "last",
    )


def _recompute(near: Nearest) -> None:
    now = near.strategy.recompute
    known = now.kind in ("none", "full", "groups", "first") or (
        now.kind == "modules" and set(now.names) <= set(MODULES)
    )
    some = now.kind in ("ops", "modules")
    why = (
        f"modules that are recomputed are {', '.join(MODULES)}"
        if some
        else ("whole layers are recomputed: all, groups, or the first of each stage")
    )
    near.recompute(known, _CORE if some else FULL, why)
    now = near.strategy.recompute
    if now.kind == "groups" and now.count == 1:
        near.change("groups of one layer are full recomputation", recompute=FULL)
    if now.kind == "modules":
        names = tuple(sorted(set(now.names), key=MODULES.index))
        near.change("modules are a set", recompute=Recompute("modules", names=names))


def settings(strategy: Strategy, facts: ConfigFacts) -> dict[str, Any]:
    """The flags that say an expressible strategy; None is a flag that is not given."""
    batch, ranks = facts.batch, strategy.dp_replicate * strategy.dp_shard
    if batch.samples is None:
        raise FrameworkError("the samples of a step are needed")
    cut, pipelined = strategy.stage_cut, strategy.pp > 1
    virtual = strategy.virtual_stages if pipelined and cut is None else 1
    swapped = strategy.order != AXES
    return {
        "tensor-model-parallel-size": strategy.tp,
        "pipeline-model-parallel-size": strategy.pp,
        "num-virtual-stages-per-pipeline-rank": virtual if virtual > 1 else None,
        "num-layers-per-virtual-pipeline-stage": None,
        "pipeline-model-parallel-layout": layout_text(cut) if pipelined and cut else None,
        "decoder-first-pipeline-num-layers": None,
        "decoder-last-pipeline-num-layers": None,
        "context-parallel-size": strategy.cp,
        "cp-comm-type": _COMM[strategy.cp_style] if strategy.cp > 1 else None,
        "expert-model-parallel-size": strategy.ep,
        "expert-tensor-parallel-size": strategy.expert_tensor
        if strategy.expert_tensor != strategy.tp
        else None,
        "use-tp-pp-dp-mapping": swapped or None,
        "sequence-parallel": (strategy.tp > 1 and strategy.sequence_parallel) or None,
        "tp-comm-overlap": strategy.async_tp or None,
        "overlap-moe-expert-parallel-comm": strategy.ep_overlap or None,
        "moe-token-dispatcher-type": "alltoall" if strategy.ep_overlap else None,
        "micro-batch-size": batch.samples // (ranks * strategy.micro_batches),
        "global-batch-size": batch.samples,
        "seq-length": batch.sequence,
        "clip-grad": facts.clip,
        **_storage_keys(strategy),
        **_recompute_keys(strategy.recompute),
        "optimizer-cpu-offload": bool(strategy.offload) or None,
        "bf16": strategy.param_dtype == "bfloat16" or None,
        "fp16": strategy.param_dtype == "float16" or None,
        "grad-reduce-in-bf16": strategy.reduce_dtype == "bfloat16" or None,
        "fp8-format": "hybrid" if strategy.fp8 else None,
        "fp8-recipe": strategy.fp8,
        "fp8-param-gather": strategy.fp8_gather or None,
        "cross-entropy-loss-fusion": strategy.loss == _FUSED or None,
        "cross-entropy-fusion-impl": "te" if strategy.loss == _FUSED else None,
    }


def _storage_keys(strategy: Strategy) -> dict[str, Any]:
    sharded = strategy.dp_shard * strategy.cp > 1 and strategy.zero > 0
    zero = strategy.zero if sharded else 0
    torch = zero == 3 and not strategy.reshards
    whole = zero >= 2 and not torch
    return {
        "use-distributed-optimizer": (zero == 1 or whole) or None,
        "use-megatron-fsdp": whole or None,
        "data-parallel-sharding-strategy": _STRATEGY[zero] if whole else None,
        "use-torch-fsdp2": torch or None,
        "torch-fsdp2-no-reshard-after-forward": torch or None,
        "num-distributed-optimizer-instances": strategy.dp_replicate
        if sharded and strategy.dp_replicate > 1
        else None,
    }


def _recompute_keys(kind: Recompute) -> dict[str, Any]:
    method = {"full": "uniform", "groups": "uniform", "first": "block"}.get(kind.kind)
    granularity = "full" if method else "selective" if kind.kind == "modules" else None
    return {
        "recompute-activations": None,
        "recompute-granularity": granularity,
        "recompute-method": method,
        "recompute-num-layers": (kind.count or 1) if method else None,
        "recompute-modules": list(kind.names) or None,
    }


def script_text(flags: dict[str, Any], strategy: Strategy) -> str:
    """A shell script with the flags."""
    lines = [
        f"    --{name}" + ("" if value is True else f" {_flag_value(value)}")
        for name, value in flags.items()
        if value is not None
    ]
    body = "\n".join(lines)
    per_node = max(n for n in range(1, 9) if strategy.devices % n == 0)
    return (
        "#!/bin/bash\n# Flags of Megatron-LM, written by shardwright; model and data are yours.\n"
        f"GPUS_PER_NODE={per_node}\n"
        f"WORLD_SIZE={strategy.devices}\n"
        f"PARALLEL_ARGS=(\n{body}\n)\n"
        'torchrun --nproc-per-node "$GPUS_PER_NODE" --nnodes "$((WORLD_SIZE / GPUS_PER_NODE))" \\\n'
        '    pretrain_gpt.py "${PARALLEL_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}"\n'
    )


def _flag_value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    text = str(value)
    return f'"{text}"' if set(text) & set("|()*") else text


def bridge_settings(strategy: Strategy, facts: ConfigFacts) -> dict[str, Any]:
    """The keys of Megatron-Bridge that say an expressible strategy."""
    flags = settings(strategy, facts)
    given = {
        name: value for name, value in flags.items() if name in KEY_OF and name not in _BY_NAME
    }
    off = ("sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp")
    for name in (*off, "optimizer-cpu-offload", "cross-entropy-loss-fusion"):
        given[name] = bool(given[name])
    found: dict[str, Any] = {KEY_OF[name]: value for name, value in given.items()}
    # Where one of the two is on, both are.
    found["optimizer.use_distributed_optimizer"] = given["use-distributed-optimizer"]
    # The class of dataset decides which of its two names for the length there is.
    found["model.seq_length"] = found["dataset.seq_length"] = facts.batch.sequence
    mixed = "fp16_mixed" if strategy.param_dtype == "float16" else _MIXED[strategy.fp8]
    return {**found, "mixed_precision": mixed}
