"""DeepSpeed: the keys of its JSON that say a strategy."""

from __future__ import annotations

import itertools
from typing import Any

from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.writers.nearest import WHOLE, ConfigFacts, Nearest
from shardwright.ir.options.mixed_precision import HALF_DTYPES
from shardwright.ir.strategy.recompute import NONE
from shardwright.ir.strategy.strategy import Strategy

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_DTYPES = {
    **{
        (param, reduced, kept, state): f"{_SHORT[param]} with gradients in {_SHORT[kept]}"
        for param, reduced, kept, state in itertools.product(
            HALF_DTYPES, _SHORT, _SHORT, ("float32", "bfloat16")
        )
        if state == "float32" or (param == "bfloat16" and kept == "bfloat16")
    },
    WHOLE: "float32",
}


def nearest(strategy: Strategy, facts: ConfigFacts) -> tuple[Strategy, list[str]]:
    """The nearest strategy that DeepSpeed expresses, and the reasons."""
    near = Nearest(strategy)
    near.plain_order()
    near.fold("pp", "pipelines stand in the program; their devices shard data instead")
    now = near.strategy
    if now.tp > 1 and now.cp > 1:
        near.fold("tp", "tensor and sequence parallelism exclude each other")
    if near.strategy.cp > 1:
        near.change("long sequences are split by Ulysses", cp_style="ulysses")
    if near.strategy.tp > 1:
        near.change("AutoTP has no sequence parallelism", sequence_parallel=False)
        near.change("the loss is not split", loss="whole")
    alone = near.strategy.ep > 1
    near.change("the features of an expert are split as tp is", etp=1 if alone else None)
    _stage(near)
    now = near.strategy
    near.change(
        "gradients are reduced after every micro-batch in stages 2 and 3, else after the last",
        gradient_sync="every" if _stage_of(now) >= 2 else "last",
    )
    near.change("messages of experts run beside no other micro-batch", ep_overlap=False)
    near.change("recomputation stands in the program", recompute=NONE)
    stage = _stage_of(near.strategy)
    offloaded = tuple(
        what
        for what, least in (("optimizer", 1), ("parameters", 3))
        if what in near.strategy.offload and stage >= least
    )
    near.change(
        "the optimizer's state is kept on the host from stage 1, parameters in stage 3, activations"
        " never",
        offload=offloaded,
    )
    if stage == 0:
        near.dtypes({key: said for key, said in _DTYPES.items() if key[3] == "float32"}, WHOLE)
    near.dtypes(_DTYPES, WHOLE)
    near.change("8-bit products are not given here", fp8=None)
    near.change("layers are not compiled by themselves", compile="off")
    near.one_of("loss", ("vocabulary-parallel", "whole"), "whole", "the loss is the model's")
    near.fit_batch(facts.batch)
    return near.strategy, near.reasons


def _stage(near: Nearest) -> None:
    now = near.strategy
    if now.dp_shard * now.cp == 1:
        return
    if now.tp > 1 and now.zero == 3:
        near.change("AutoTP needs ZeRO stage 2 or less", zero=2, reshard_after_forward=None)
    now = near.strategy
    if now.zero == 3 and not now.reshards:
        near.change("stage 3 gathers parameters again", reshard_after_forward=None)
    if now.dp_replicate > 1:
        near.fold(
            "dp_replicate", "replicas of shards (MiCS) are gone since 0.19.8; all devices shard"
        )


def _stage_of(strategy: Strategy) -> int:
    return strategy.zero if strategy.dp_shard * strategy.cp > 1 else 0


def settings(strategy: Strategy, facts: ConfigFacts) -> dict[str, Any]:
    """The keys of DeepSpeed's JSON."""
    ranks = strategy.dp_replicate * strategy.dp_shard
    samples, stage = facts.batch.samples, _stage_of(strategy)
    if samples is None:
        raise FrameworkError("the samples of a step are needed")
    narrow = strategy.param_dtype in HALF_DTYPES
    masters = strategy.state_dtype == "bfloat16"
    offload = "zero_optimization.offload_"
    return {
        "train_batch_size": samples,
        "train_micro_batch_size_per_gpu": samples // (ranks * strategy.micro_batches),
        "gradient_accumulation_steps": strategy.micro_batches,
        "gradient_clipping": facts.clip,
        "zero_optimization.stage": stage,
        "zero_optimization.mics_shard_size": None,
        f"{offload}optimizer.device": "cpu" if "optimizer" in strategy.offload else None,
        f"{offload}param.device": "cpu" if "parameters" in strategy.offload else None,
        "tensor_parallel.autotp_size": strategy.tp if strategy.tp > 1 else None,
        "sequence_parallel_size": strategy.cp if strategy.cp > 1 else None,
        "expert_parallel.enabled": True if strategy.ep > 1 else None,
        "expert_parallel.autoep_size": strategy.ep if strategy.ep > 1 else None,
        "bf16.enabled": True if strategy.param_dtype == "bfloat16" else None,
        "bf16.bf16_master_weights_and_grads": True if masters and narrow else None,
        "fp16.enabled": True if strategy.param_dtype == "float16" else None,
        "communication_data_type": _SHORT[str(strategy.reduce_dtype)] if narrow else None,
        "data_types.grad_accum_dtype": _SHORT[str(strategy.grad_dtype)] if narrow else None,
    }
