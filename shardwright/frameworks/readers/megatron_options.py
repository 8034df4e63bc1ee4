"""Megatron-LM's options of storage, dtypes, recomputation, offload and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.frameworks.readers.understood import MIXED_BF16, WHOLE
from shardwright.frameworks.settings import Settings
from shardwright.ir.options.fp8 import GATHERABLE
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute

CP_STYLES = {
    "p2p": "ring-zigzag",
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "a2a": "ulysses",
    "a2a+p2p": "ring-zigzag",
}
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
MODULES = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
RECIPES = {
    "delayed": "delayed",
    "tensorwise": "tensorwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
}


def cp_style(settings: Settings) -> str:
    """The algorithm by which attention crosses the sequence."""
    styles = settings.words("cp-comm-type", "cp_style")
    if len(set(styles)) > 1:
        settings.differ("cp-comm-type", "layers differ; the first is read for all")
    word = styles[0].lower() if styles else "p2p"
    settings.require(word in CP_STYLES, "cp-comm-type", f"one of {', '.join(CP_STYLES)} is needed")
    if word == "a2a+p2p":
        settings.differ("cp-comm-type", "a ring of groups that exchange heads; read as a ring")
    return CP_STYLES[word]


def async_tp(settings: Settings, tp: int) -> bool:
    """Whether messages of tensor parallelism run beside products."""
    name = "tp-comm-overlap"
    if tp == 1 or not settings.switch(name, False, "async_tp"):
        return False
    split = settings.switch("sequence-parallel", False, "sequence_parallel")
    settings.require(split, name, "sequence-parallel is needed too")
    return True


def ep_overlap(settings: Settings, ep: int, micro_batches: int) -> bool:
    """Whether messages of experts run beside operators of another micro-batch."""
    name = "overlap-moe-expert-parallel-comm"
    if not settings.switch(name, False, "ep_overlap"):
        return False
    settings.require(ep > 1, name, "expert-model-parallel-size of 2 or more is needed too")
    if micro_batches == 1:
        settings.differ(name, "a step of one micro-batch has no other to overlap with; read as off")
    return micro_batches > 1


def storage(settings: Settings, dp: int) -> dict[str, Any]:
    """Sharding of data parallelism: of what, over which ranks, and when gradients are reduced."""
    shards = settings.switch("use-distributed-optimizer", False, "zero")
    # Megatron-Bridge has two switches, and both are on where one is.
    shards |= settings.switch("optimizer.use_distributed_optimizer", False, "zero")
    zero, again, sync = (1 if shards else 0), None, "last"
    if settings.switch("use-megatron-fsdp", False, "zero") or settings.switch(
        "use-custom-fsdp", False, "zero"
    ):
        name = "data-parallel-sharding-strategy"
        zero = settings.word(name, 3, SHARDED, "zero")
        sync = "every" if zero >= 2 else "last"
        again = True if zero == 3 else None
    elif settings.switch("use-torch-fsdp2", False, "zero"):
        name = "torch-fsdp2-no-reshard-after-forward"
        keeps = settings.switch(name, False, "reshard_after_forward")
        zero, again, sync = 3, not keeps, "every"
    instances = settings.integer("num-distributed-optimizer-instances", 1, "dp_replicate")
    if settings.text("outer-dp-sharding-strategy", "no_shard", "dp_replicate") == "optim":
        settings.differ(
            "outer-dp-sharding-strategy", "the state is sharded over replicas too; read as without"
        )
    settings.require(
        dp % instances == 0,
        "num-distributed-optimizer-instances",
        f"a divisor of the {dp} data-parallel ranks is needed",
    )
    replicas = dp if zero == 0 else instances
    return {
        "dp_replicate": replicas,
        "dp_shard": dp // replicas,
        "zero": zero,
        "reshard_after_forward": again,
        "gradient_sync": sync,
    }


def recompute(settings: Settings) -> Recompute:
    """The modules or layers that are recomputed."""
    if settings.switch("recompute-activations", False, "recompute"):
        return Recompute("modules", names=("core_attn",))
    kind = settings.word(
        "recompute-granularity", None, {"full": "full", "selective": "selective"}, "recompute"
    )
    if kind is None:
        return NONE
    if kind == "selective":
        names = settings.words("recompute-modules", "recompute") or ("core_attn",)
        names = tuple(word for name in names for word in name.split())
        for name in names:
            settings.require(
                name in MODULES, "recompute-modules", f"some of {', '.join(MODULES)} are needed"
            )
        return Recompute("modules", names=tuple(sorted(set(names), key=MODULES.index)))
    method = settings.word(
        "recompute-method", None, {"uniform": "groups", "block": "first"}, "recompute"
    )
    settings.require(
        method is not None,
        "recompute-granularity",
        "recompute-method uniform or block is needed too",
    )
    count = settings.integer("recompute-num-layers", 1, "recompute")
    if method == "groups" and count == 1:
        return FULL
    return Recompute(str(method), count)


def offload(settings: Settings) -> tuple[str, ...]:
    """Activations and state that are kept on the host."""
    layers = settings.integer("cpu-offloading-num-layers", 0, "offload", least=0)
    fine = settings.switch("fine-grained-activation-offloading", False, "offload")
    if layers or fine:
        name = "cpu-offloading-num-layers" if layers else "fine-grained-activation-offloading"
        settings.raw("offload-modules", "offload")
        settings.differ(name, "part of the activations goes to the host; read as all of them")
    state = settings.switch("optimizer-cpu-offload", False, "offload")
    fraction = settings.number("optimizer-offload-fraction", 1.0, "offload")
    if state and fraction < 1:
        settings.differ("optimizer-offload-fraction", "read as all of the optimizer's state")
    return (("activations",) if layers or fine else ()) + (("optimizer",) if state else ())


def dtypes(settings: Settings) -> dict[str, str]:
    """Dtypes of parameters, reductions, gradients and state."""
    if settings.switch("fp16", False, "param_dtype"):
        found = {**MIXED_BF16, "param_dtype": "float16"}
    elif settings.switch("bf16", False, "param_dtype"):
        found = dict(MIXED_BF16)
    else:
        found = dict(WHOLE)
    if settings.switch("grad-reduce-in-bf16", False, "reduce_dtype", "grad_dtype"):
        found |= {"reduce_dtype": "bfloat16", "grad_dtype": "bfloat16"}
    if settings.switch("use-precision-aware-optimizer", False, "state_dtype"):
        names = [f"{part}-dtype" for part in ("main-params", "exp-avg", "exp-avg-sq")]
        kinds = {settings.text(name, "fp32", "state_dtype") for name in names}
        if kinds - {"fp32", "float32"}:
            changed = next(name for name in names if name in settings)
            settings.differ(changed, "parts of the state have other dtypes; read as float32")
    return found


def fp8(settings: Settings) -> str | None:
    """Scaling of matrix products in 8 bits."""
    if "fp4-format" in settings:
        settings.text("fp4-format", None, "fp8")
        settings.differ("fp4-format", "products in 4 bits are not known; read as bf16")
    formats = {"e4m3": "e4m3", "hybrid": "hybrid"}
    if settings.word("fp8-format", None, formats, "fp8") is None:
        return None
    return settings.word("fp8-recipe", "delayed", RECIPES, "fp8")


def fp8_gather(settings: Settings, recipe: str | None, storage: Mapping[str, Any], cp: int) -> bool:
    """Whether shards of weights are cast to 8 bits before they are gathered."""
    name = "fp8-param-gather"
    if not settings.switch(name, False, "fp8_gather") or recipe is None:
        return False
    settings.require(storage["zero"] > 0, name, "use-distributed-optimizer or FSDP is needed too")
    if recipe == "blockwise":
        settings.differ(name, "weights with scales of blocks are read as gathered in bf16")
    if recipe == "mxfp8":
        settings.notes.append("weights in MXFP8 are gathered in bf16, and cast where they arrive")
    return recipe in GATHERABLE and storage["dp_shard"] * cp > 1


def loss(settings: Settings) -> str:
    """The form of the loss: always over split vocabularies, maybe fused."""
    fused = settings.switch("cross-entropy-loss-fusion", False, "loss")
    settings.text("cross-entropy-fusion-impl", "native", "loss")
    return "vocabulary-parallel-fused" if fused else "vocabulary-parallel"
