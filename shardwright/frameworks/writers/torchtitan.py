"""torchtitan: the keys that say a strategy, in TOML or in a function that changes a baseline."""

from __future__ import annotations

import re
from typing import Any

from shardwright.frameworks.documents.python_text import Code
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.readers import torchtitan as reader
from shardwright.frameworks.readers.torchtitan_options import (
    AC,
    ASYNC_TP,
    FLOAT8,
    RESHARD,
    SELECTIVE,
)
from shardwright.frameworks.writers.nearest import WHOLE, ConfigFacts, Nearest
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.strategy.fields import chunks_of
from shardwright.ir.strategy.recompute import FULL, NONE, Recompute
from shardwright.ir.strategy.strategy import Strategy

_DTYPES = {
    (param, "float32", kept, kept): f"{param} with {kept} state"
    for param in ("bfloat16", "float32")
    for kept in ("float32", "bfloat16")
}
_SIZE = re.compile(r"[\w.-]*")  # as in 8B, debugmodel, 235B-A22B
_COMPILED_ASYNC_TP = ASYNC_TP.replace("parallelism", "compile")  # since configs are Python
_IMPORTS = "torchtitan.distributed.activation_checkpoint"


def nearest(strategy: Strategy, facts: ConfigFacts, dialect: str) -> tuple[Strategy, list[str]]:
    """The nearest strategy that a dialect of torchtitan expresses, and the reasons."""
    near, is_toml = Nearest(strategy), dialect == reader.TOML
    near.plain_order()
    near.fsdp2()
    if is_toml:
        near.one_of(
            "cp_style",
            ("all-gather", "ring-zigzag"),
            "all-gather",
            "context parallelism gathers or rotates keys and values; it has no Ulysses",
        )
        near.change("tensor parallelism has sequence parallelism", sequence_parallel=True)
    elif near.strategy.cp > 1:
        near.change("context parallelism gathers keys and values", cp_style="all-gather")
    _experts(near, is_toml)
    _pipeline(near, facts)
    near.change(
        "gradients are reduced after the last micro-batch of a pipeline, else after every one",
        gradient_sync="last" if near.strategy.pp > 1 else "every",
    )
    near.change("messages of experts run beside no other micro-batch", ep_overlap=False)
    if near.strategy.async_tp:
        near.change("asynchronous tensor parallelism needs compiled layers", compile="regional")
    _recompute(near, is_toml)
    _rest(near, is_toml)
    micro = near.fit_batch(facts.batch)
    tokens = micro * (facts.batch.sequence or 0) // near.strategy.cp
    chunks = chunks_of(near.strategy.loss) or 1
    if tokens % chunks:
        near.change(
            f"{tokens} tokens of a rank are not divided in {chunks} chunks of the loss",
            loss="vocabulary-parallel",
        )
    return near.strategy, near.reasons


def _experts(near: Nearest, is_toml: bool) -> None:
    now = near.strategy
    if now.ep == 1:
        near.change("experts are split as the rest is where ep is 1", etp=None)
        return
    tensor = (1, now.tp) if is_toml else (1,)
    if now.expert_tensor not in tensor:
        near.change("the features of an expert are not split", etp=1)
    now = near.strategy
    if now.dp_shard * now.cp * now.tp % (now.ep * now.expert_tensor):
        near.change(
            "experts are split over ranks of one replica",
            dp_replicate=1,
            dp_shard=now.dp_replicate * now.dp_shard,
        )


def _pipeline(near: Nearest, facts: ConfigFacts) -> None:
    near.schedule([name for name, one in SCHEDULES.items() if not one.asynchronous], "")
    now = near.strategy
    free = SCHEDULES[now.schedule].stages_per_group is None
    even = now.virtual_stages == 2 or layers_per_stage(now, facts.layers) is not None
    if now.pp > 1 and free and now.stage_cut is None and not even:
        near.change(
            f"{now.virtual_stages} stages a rank need stages of equal layers, and the number of"
            " layers; 2 stages a rank are its default",
            virtual_stages=2,
        )


def layers_per_stage(strategy: Strategy, layers: int | None) -> int | None:
    """Layers of a stage, embedding and output counted, that make as many stages; None: none do."""
    if layers is None:
        return None
    stages = strategy.stages
    each = -(-(layers + 2) // stages)
    return each if -(-(layers + 2) // each) == stages else None


def _recompute(near: Nearest, is_toml: bool) -> None:
    now = near.strategy.recompute
    known = now in (NONE, FULL, SELECTIVE) or (is_toml and now.kind == "every" and now.count > 1)
    if now.kind == "budget":
        near.change("a memory budget needs a compiled model", compile="regional")
        return
    some = now.kind in ("ops", "modules")
    why = "only SelectiveAC's list of operators is kept" if some else "whole layers are recomputed"
    near.recompute(known, SELECTIVE if some else FULL, why)


def _rest(near: Nearest, is_toml: bool) -> None:
    """Offload, dtypes, fp8 and loss."""
    both = ("optimizer", "parameters")
    if near.strategy.offload not in ((), both):
        offloaded = any(what in near.strategy.offload for what in both)
        near.change(
            "CPU offload is of parameters and optimizer state together, not of activations",
            offload=both if offloaded else (),
        )
    near.dtypes(_DTYPES, WHOLE)
    recipes = ("rowwise", "tensorwise", "mxfp8", None) if is_toml else ("rowwise", "mxfp8", None)
    near.one_of("fp8", recipes, "rowwise", f"float8 is {' or '.join(recipes[:-1])}")
    if is_toml and near.strategy.dp_shard == 1:
        near.change("weights are gathered in 8 bits along dp_shard alone", fp8_gather=False)
    loss = near.strategy.loss
    if is_toml:
        near.one_of(
            "loss",
            ("vocabulary-parallel", "whole"),
            "vocabulary-parallel",
            "the loss is neither chunked nor fused",
        )
    elif chunks_of(loss) is None:
        near.one_of(
            "loss",
            ("vocabulary-parallel",),
            "vocabulary-parallel",
            "the loss is split over tp, in chunks or not",
        )


def settings(strategy: Strategy, facts: ConfigFacts, dialect: str) -> dict[str, Any]:
    """The keys that say an expressible strategy; None is a key that is not given."""
    is_toml = dialect == reader.TOML
    reshard = next(w for w, again in RESHARD.items() if again == strategy.reshard_after_forward)
    found: dict[str, Any] = {
        reader.DP_REPLICATE: strategy.dp_replicate,
        reader.DP_SHARD: strategy.dp_shard,
        reader.CP: strategy.cp,
        reader.TP: strategy.tp,
        reader.PP: strategy.pp,
        reader.EP: strategy.ep,
        "parallelism.fsdp_reshard_after_forward": reshard,
        "parallelism.enable_sequence_parallel": None if is_toml else strategy.sequence_parallel,
        **_pipeline_keys(strategy, facts, is_toml),
        **_batch_keys(strategy, facts, dialect),
        "training.enable_cpu_offload": bool(strategy.offload),
        "training.dtype": strategy.state_dtype,
        "training.mixed_precision_param": strategy.param_dtype,
        "compile.enable": strategy.compile == "regional",
        ASYNC_TP if is_toml else _COMPILED_ASYNC_TP: strategy.async_tp or None,
    }
    if facts.clip is not None:
        found["training.max_norm"] = facts.clip
    if is_toml:
        found |= _toml_keys(strategy)
    else:
        found |= _function_keys(strategy, facts, dialect)
    return found


def _pipeline_keys(strategy: Strategy, facts: ConfigFacts, is_toml: bool) -> dict[str, Any]:
    parts = "parallelism.module_fqns_per_model_part"
    each = "parallelism.pipeline_parallel_layers_per_stage"
    schedule = "parallelism.pipeline_parallel_schedule"
    if strategy.pp == 1:
        return {schedule: "1F1B", parts: None, each: None}
    free = SCHEDULES[strategy.schedule].stages_per_group is None
    named = (
        layers_per_stage(strategy, facts.layers) if free and strategy.stage_cut is None else None
    )
    # Reading these keys back needs a model of the flavor table.
    named = None if strategy.virtual_stages == 2 else named
    cut = strategy.stage_cut
    return {
        schedule: strategy.schedule,
        parts: None if cut is None else _parts(cut, "output" if is_toml else "lm_head"),
        each: named,
    }


def _parts(cut: tuple[int, ...], head: str) -> list[list[str]]:
    """Names of the modules of every stage."""
    found, layer = [], 0
    for layers in cut:
        found.append([f"layers.{n}" for n in range(layer, layer + layers)])
        layer += layers
    found[0] = ["tok_embeddings", *found[0]]
    found[-1] = [*found[-1], "norm", head]
    return found


def _batch_keys(strategy: Strategy, facts: ConfigFacts, dialect: str) -> dict[str, Any]:
    """The batch; a pipeline takes all micro-batches of a step in one go."""
    batch, ranks = facts.batch, strategy.dp_replicate * strategy.dp_shard
    if batch.samples is None or batch.sequence is None:
        raise FrameworkError(
            "torchtitan's config needs the samples of a step and the tokens of a sequence"
        )
    micro = batch.samples // (ranks * strategy.micro_batches)
    parts = strategy.micro_batches if strategy.pp > 1 else 1
    if dialect == reader.TOKENS:
        return {
            "training.max_context_length": batch.sequence,
            "training.num_tokens_per_microbatch_per_dp_rank": micro * batch.sequence,
            "training.num_tokens_per_train_step": batch.samples * batch.sequence,
            "parallelism.num_pp_microbatches": parts,
        }
    return {
        "training.local_batch_size": micro * parts,
        "training.global_batch_size": batch.samples,
        "training.seq_len": batch.sequence,
        "parallelism.pipeline_parallel_microbatch_size": micro if parts > 1 else 1,
    }


def _toml_keys(strategy: Strategy) -> dict[str, Any]:
    kind = strategy.recompute
    mode = {"ops": "selective", "every": "selective", "budget": "memory_budget"}.get(
        kind.kind, kind.kind
    )
    option = "op" if kind.kind == "ops" else str(kind.count) if kind.kind == "every" else None
    converter = {"mxfp8": ["mx"], None: []}.get(strategy.fp8, ["float8"])
    gathers, float8 = strategy.fp8_gather or None, converter == ["float8"]
    etp = "parallelism.expert_tensor_parallel_degree"
    ring = {"all-gather": "allgather"}.get(strategy.cp_style, "alltoall")
    return {
        etp: strategy.expert_tensor if strategy.ep > 1 else 1,
        "parallelism.context_parallel_rotate_method": ring,
        "parallelism.disable_loss_parallel": strategy.loss == "whole",
        f"{AC}.mode": mode,
        f"{AC}.selective_ac_option": option,
        f"{AC}.memory_budget": kind.fraction or None,
        "model.converters": converter,
        # Without a name it is tensorwise, and with one torchtitan refuses gathers in 8 bits.
        f"{FLOAT8}.recipe_name": strategy.fp8 if float8 and not gathers else None,
        f"{FLOAT8}.enable_fsdp_float8_all_gather": gathers,
        f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp": gathers,
    }


def _function_keys(strategy: Strategy, facts: ConfigFacts, dialect: str) -> dict[str, Any]:
    kind = strategy.recompute
    chunks = chunks_of(strategy.loss)
    vocabulary = "config.loss.loss_fn.global_vocab_size"
    inner = f"CrossEntropyLoss.Config(global_vocab_size={vocabulary})"
    losses = (
        Code(inner, "CrossEntropyLoss.Config")
        if chunks is None
        else Code(
            f"ChunkedLossWrapper.Config(num_chunks={chunks}, loss_fn={inner})",
            "ChunkedLossWrapper.Config",
        )
    )
    graphs = strategy.pp > 1 or strategy.ep > 1
    return {
        AC: _checkpointing(kind),
        "training.disable_cuda_graphs": True if graphs else None,
        "parallelism.spmd_backend": "spmd_types" if strategy.cp > 1 else None,
        "loss": losses,
        "model_spec": _spec(strategy, facts),
    }


def _checkpointing(kind: Recompute) -> Code:
    if kind == NONE:
        return Code("None", None)
    if kind.kind == "budget":
        return Code(
            f"MemoryBudgetAC.Config(memory_budget={kind.fraction!r})", "MemoryBudgetAC.Config"
        )
    name = "FullAC.Config" if kind == FULL else "SelectiveAC.Config"
    return Code(f"{name}()", name)


def _spec(strategy: Strategy, facts: ConfigFacts) -> Code | None:
    if strategy.fp8 is None:
        return None
    recipe = strategy.fp8
    compiled = f"model_compile_enabled={strategy.compile == 'regional'}"
    converter = (
        f"MXFP8LinearConverter.Config({compiled})"
        if recipe == "mxfp8"
        else f'Float8LinearConverter.Config(recipe_name="{recipe}", {compiled})'
    )
    size = (facts.model or "llama3 8B").split()[-1]
    if not _SIZE.fullmatch(size):
        raise _not_a_model(facts)
    return Code(f'model_registry("{size}", converters=[{converter}])', "model_registry")


def _model_names(facts: ConfigFacts) -> tuple[str, str]:
    """The model's family and size, which are written into code; raises `FrameworkError`."""
    family, _, size = (facts.model or "llama3 8B").partition(" ")
    if not family.isidentifier() or not _SIZE.fullmatch(size):
        raise _not_a_model(facts)
    return family, size


def _not_a_model(facts: ConfigFacts) -> FrameworkError:
    return FrameworkError(
        f"torchtitan: {facts.model!r} is no name of a model; give a family and a size, as in"
        " 'llama3 8B'"
    )


def function_text(keys: dict[str, Any], facts: ConfigFacts) -> str:
    """A module with a function that changes the fields of a baseline."""
    family, size = _model_names(facts)
    base = f"{family}_{size.lower().replace('-', '_').replace('.', '_')}"
    shown = {key: value for key, value in keys.items() if value is not None}
    text = "\n".join(str(getattr(value, "text", "")) for value in shown.values())
    imports = [
        *_imported("torchtitan.components.loss", ("ChunkedLossWrapper", "CrossEntropyLoss"), text),
        *_imported(
            "torchtitan.components.quantization",
            ("Float8LinearConverter", "MXFP8LinearConverter"),
            text,
        ),
        *_imported(_IMPORTS, ("FullAC", "MemoryBudgetAC", "SelectiveAC"), text),
        *_imported(f"torchtitan.models.{family}", ("model_registry",), text),
        f"from torchtitan.models.{family}.config_registry import {base}",
        "from torchtitan.trainer import Trainer",
    ]
    lines = [
        f"    config.{key} = {value.text if isinstance(value, Code) else repr(value)}"
        for key, value in shown.items()
    ]
    body = "\n".join(lines)
    yours = "" if facts.model else f"; put your baseline in place of {base}"
    head = f'"""A config of torchtitan, written by shardwright{yours}."""'
    return (
        f"{head}\n\n" + "\n".join(imports) + f"\n\n\ndef {base}_planned() -> Trainer.Config:\n"
        f"    config = {base}()\n{body}\n    return config\n"
    )


def _imported(module: str, names: tuple[str, ...], text: str) -> list[str]:
    used = [name for name in names if name in text]
    return [f"from {module} import {', '.join(used)}"] if used else []
