"""Megatron-Bridge: YAML overrides of a recipe, and dotted options of a command line."""

from __future__ import annotations

from dataclasses import replace

from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.readers import megatron
from shardwright.frameworks.readers.understood import Given, Understood
from shardwright.frameworks.settings import Settings
from shardwright.ir.options.fp8 import GATHERABLE

YAML, FLAGS = "YAML override of a recipe", "dotted options"
# Bridge's keys -> the flags of Megatron-LM that mean the same.
FLAG_OF = {
    **{
        f"model.{name.replace('-', '_')}": name
        for name in (
            *("tensor-model-parallel-size", "pipeline-model-parallel-size"),
            *("context-parallel-size", "expert-model-parallel-size"),
            *("expert-tensor-parallel-size", "sequence-parallel", "cp-comm-type"),
            *("recompute-granularity", "recompute-method", "recompute-num-layers"),
            *("recompute-modules", "pipeline-model-parallel-layout", "hidden-size", "seq-length"),
            *("num-layers", "ffn-hidden-size", "num-attention-heads", "num-query-groups"),
            *("vocab-size", "moe-router-topk", "moe-ffn-hidden-size"),
            *("cross-entropy-loss-fusion", "cross-entropy-fusion-impl"),
            *("fine-grained-activation-offloading", "offload-modules", "cpu-offloading-num-layers"),
            *("calculate-per-token-loss", "fp8-recipe", "fp4-format"),
        )
    },
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "model.num_moe_experts": "num-experts",
    "model.fp8": "fp8-format",
    "mixed_precision.fp8": "fp8-format",
    "mixed_precision.fp8_recipe": "fp8-recipe",
    "mixed_precision.fp8_param_gather": "fp8-param-gather",
    "mixed_precision.bf16": "bf16",
    "mixed_precision.fp16": "fp16",
    "train.micro_batch_size": "micro-batch-size",
    "train.global_batch_size": "global-batch-size",
    "dataset.seq_length": "seq-length",
    "dataset.sequence_length": "seq-length",
    "ddp.use_distributed_optimizer": "use-distributed-optimizer",
    "ddp.num_distributed_optimizer_instances": "num-distributed-optimizer-instances",
    "ddp.use_megatron_fsdp": "use-megatron-fsdp",
    "ddp.data_parallel_sharding_strategy": "data-parallel-sharding-strategy",
    "ddp.outer_dp_sharding_strategy": "outer-dp-sharding-strategy",
    "model.tp_comm_overlap": "tp-comm-overlap",
    "comm_overlap.tp_comm_overlap": "tp-comm-overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "overlap-moe-expert-parallel-comm",
    "model.moe_token_dispatcher_type": "moe-token-dispatcher-type",
    "ddp.overlap_grad_reduce": "overlap-grad-reduce",
    "ddp.overlap_param_gather": "overlap-param-gather",
    "dist.use_torch_fsdp2": "use-torch-fsdp2",
    "dist.use_tp_pp_dp_mapping": "use-tp-pp-dp-mapping",
    "optimizer.clip_grad": "clip-grad",
    "optimizer.optimizer_cpu_offload": "optimizer-cpu-offload",
    "optimizer.optimizer_offload_fraction": "optimizer-offload-fraction",
    "optimizer.use_precision_aware_optimizer": "use-precision-aware-optimizer",
}
KEY_OF = {flag: key for key, flag in reversed(FLAG_OF.items())}
REDUCES = "mixed_precision.grad_reduce_in_fp32"
_REDUCES_ALONE = "ddp.grad_reduce_in_fp32"
_SAYS = ("param_dtype", "fp8", "fp8_gather")  # a name of mixed precision
_RECIPES = {  # names of mixed precision -> format and recipe of fp8
    "bf16_mixed": None,
    "fp16_mixed": None,
    "bf16_with_fp8_delayed_scaling_mixed": "delayed",
    "bf16_with_fp8_current_scaling_mixed": "tensorwise",
    "bf16_with_fp8_subchannel_scaling_mixed": "blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
}


def recognises(document: Document) -> bool:
    """Whether a file overrides a recipe of Megatron-Bridge."""
    sections = ("model.", "train.", "ddp.")
    known = [key for key in document.entries if key in FLAG_OF and key.startswith(sections)]
    return document.form in ("yaml", "flags") and bool(known)


def settings_of(document: Document) -> Settings:
    """The keys under the names of Megatron-LM's flags, where they have one."""
    return Settings(document, lambda key: FLAG_OF.get(key, key))


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of an override, without what its recipe sets."""
    settings.notes.append(
        "keys that the file does not set are its recipe's, which is not read; Megatron-Bridge's"
        " defaults are assumed, in bf16 with gradients in float32"
    )
    dialect = YAML if settings.document.form == "yaml" else FLAGS
    found = megatron.understood(settings, given, dialect, None)
    fields = dict(found.fields)
    if "bf16" not in settings and "fp16" not in settings:
        name = settings.word(
            "mixed_precision", "bf16_mixed", {word: word for word in _RECIPES}, *_SAYS
        )
        narrow = "float16" if name.startswith("fp16") else "bfloat16"
        fields |= {"param_dtype": narrow, "fp8": _RECIPES[name] or fields["fp8"]}
        if _RECIPES[name] in GATHERABLE:  # whose recipes gather weights in 8 bits
            shards = fields["zero"] > 0 and fields["dp_shard"] * fields["cp"] > 1
            fields["fp8_gather"] = shards
        if narrow == "float16":  # whose recipe sums gradients in it
            fields |= {"reduce_dtype": narrow, "grad_dtype": narrow}
    if not settings.switch(REDUCES, True, "reduce_dtype", "grad_dtype"):
        fields |= dict.fromkeys(("reduce_dtype", "grad_dtype"), fields["param_dtype"])
    if _REDUCES_ALONE in settings:
        settings.switch(_REDUCES_ALONE, True)
        settings.notes.append(f"{_REDUCES_ALONE} has no effect: {REDUCES} replaces it")
    return Understood(
        dialect=found.dialect,
        fields=fields,
        batch=found.batch,
        model=replace(found.model, feed_forward=None, tied=None),  # the recipe's
        loss_mean=found.loss_mean,
        clip=found.clip,
    )
