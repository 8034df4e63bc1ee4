"""torchtitan: TOML, the JSON dump of a config, command lines and Python configs of three eras.

The eras differ in the unit of batches: `training.batch_size` and `local_batch_size` count
sequences, `num_tokens_per_microbatch_per_dp_rank` counts tokens.
"""

from __future__ import annotations

import math
from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.models import flavor
from shardwright.frameworks.readers import torchtitan_options as options
from shardwright.frameworks.readers.understood import (
    Given,
    Understood,
    devices_of,
    micro_batches,
    rest_of,
)
from shardwright.frameworks.settings import Settings
from shardwright.ir.schedules.registry import SCHEDULES

TOML, SEQUENCES, TOKENS = (
    "TOML of versions until 2026-02",
    "batches in sequences, 2026-02 to 2026-08",
    "batches in tokens, since 2026-08",
)
_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"
_MICRO_TOKENS = "training.num_tokens_per_microbatch_per_dp_rank"
_STEP_TOKENS = "training.num_tokens_per_train_step"
_CONTEXT = "training.max_context_length"
_PARALLEL = "parallelism"
DP_SHARD, DP_REPLICATE = (
    f"{_PARALLEL}.data_parallel_shard_degree",
    f"{_PARALLEL}.data_parallel_replicate_degree",
)
TP, CP, PP, EP = (
    f"{_PARALLEL}.{word}_parallel_degree" for word in ("tensor", "context", "pipeline", "expert")
)
ETP = f"{_PARALLEL}.expert_tensor_parallel_degree"
_SCHEDULE = f"{_PARALLEL}.pipeline_parallel_schedule"
_PER_STAGE = f"{_PARALLEL}.pipeline_parallel_layers_per_stage"
_PARTS = f"{_PARALLEL}.module_fqns_per_model_part"
_OLD = {  # keys of 2024, and what they are called since
    "training.batch_size": _LOCAL,
    "training.data_parallel_degree": DP_SHARD,
    "training.data_parallel_shard_degree": DP_SHARD,
    "training.data_parallel_replicate_degree": DP_REPLICATE,
    "training.tensor_parallel_degree": TP,
    "experimental.context_parallel_degree": CP,
    "experimental.pipeline_parallel_degree": PP,
    "experimental.pipeline_parallel_schedule": _SCHEDULE,
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.enable_async_tensor_parallel": options.ASYNC_TP,
    "compile.enable_async_tensor_parallel": options.ASYNC_TP,  # in Python
    "training.compile": "compile.enable",
    **{
        f"float8.{key}": f"{options.FLOAT8}.{key}"
        for key in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    },
    "training.enable_fsdp_cpu_offload": "training.enable_cpu_offload",
}
_STAGES_OF = {"LoopedBFS": "Interleaved1F1B", "DualPipeV": "ZBVZeroBubble"}


_TRAINING = (
    "job",
    "profiling",
    "profiler",
    "metrics",
    "checkpoint",
    "lr_scheduler",
    "comm",
    "debug",
)
_TRAINING_KEYS = (
    *("training.steps", "training.dataset", "training.dataset_path", "training.seed"),
    *("model.hf_assets_path", "model.tokenizer_path"),
)


def recognises(document: Document) -> bool:
    """Whether a file is torchtitan's."""
    if document.form == "toml":
        return document.section("parallelism") or document.section("training")
    if document.form == "flags":
        sections = ("training.", "parallelism.", "activation_checkpoint", "compile.")
        both = "module" in document.entries and "config" in document.entries
        return both or any(key.startswith(sections) for key in document.entries)
    if document.form == "python":
        return any(key.startswith(("training.", "parallelism.")) for key in document.entries)
    inside = ("training.local_batch_size", _MICRO_TOKENS, "training.batch_size")
    return document.form == "json" and any(key in document.entries for key in inside)


def settings_of(document: Document) -> Settings:
    """The keys under their names of today."""
    return Settings(document, lambda key: _OLD.get(key, key))


def dialect_of(settings: Settings) -> str:
    """The era of a file, by its keys."""
    if settings.document.form == "toml":
        return TOML
    tokens = (_MICRO_TOKENS, _STEP_TOKENS, _CONTEXT, f"{_PARALLEL}.num_pp_microbatches")
    return TOKENS if any(name in settings for name in tokens) else SEQUENCES


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of a torchtitan config."""
    dialect = dialect_of(settings)
    model = _model(settings)
    degrees = _degrees(settings, given, dialect)
    ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    pipeline = _pipeline(settings, degrees["pp"], model)
    recipe = options.fp8(settings)
    counted = _tokens if dialect == TOKENS else _sequences
    batch, count = counted(settings, ranks, degrees["pp"])
    if settings.document.form == "python":
        settings.raw("baseline", "model")
        settings.notes.append(
            "what the config's baseline sets is not in this file; torchtitan's defaults are assumed"
        )
    settings.unaffecting(
        settings.below("optimizer"), "the optimizer changes memory, not the strategy"
    )
    for section in _TRAINING:
        settings.unaffecting(settings.below(section), "training, not the strategy")
    settings.unaffecting(_TRAINING_KEYS, "training, not the strategy")
    settings.unaffecting(
        ["parallelism.pipeline_parallel_microbatch_size"], "read where there are pipelines"
    )
    return Understood(
        dialect=dialect,
        fields={
            **degrees,
            **pipeline,
            "micro_batches": count,
            **options.storage(settings, degrees),
            **options.dtypes(settings),
            "fp8": recipe,
            "fp8_gather": options.fp8_gather(settings, recipe, degrees),
            "recompute": options.recompute(settings),
            "compile": options.compiled(settings),
            "loss": options.loss(settings, dialect == TOML),
            "gradient_sync": "last" if degrees["pp"] > 1 else "every",
        },
        batch=batch,
        model=model,
        clip=settings.number("training.max_norm", 1.0, "semantics"),
    )


def _model(settings: Settings) -> ModelHints:
    """The model by name and flavor; of a command line, by module and config."""
    for family, size in (
        ("model.name", "model.flavor"),
        ("model_spec.name", "model_spec.flavor"),
        ("module", "config"),
        ("$MODULE", "$CONFIG"),
    ):
        if size in settings:
            found = flavor(settings.text(family, None, "model"), settings.text(size, None, "model"))
            break
    else:
        named = settings.text("baseline", None, "model")
        found = flavor(None, named) if named else ModelHints()
    return found


def _degrees(settings: Settings, given: Given, dialect: str) -> dict[str, Any]:
    tp = settings.integer(TP, 1, "tp")
    cp = settings.integer(CP, 1, "cp", "cp_style")
    pp = settings.integer(PP, 1, "pp")
    ep = settings.integer(EP, 1, "ep")
    replicas = settings.integer(DP_REPLICATE, 1, "dp_replicate")
    shards = settings.integer(DP_SHARD, -1, "dp_shard", least=-1)
    old = settings.text("training.data_parallel_type", "fsdp", "zero")
    settings.require(shards != 0, DP_SHARD, "-1, or a whole number of at least 1, is needed")
    if shards < 0:
        devices = devices_of(settings, given, "NGPU", settings.integer("$NGPU", None, "dp_shard"))
        others = {TP: tp, CP: cp, PP: pp, DP_REPLICATE: replicas}
        shards = rest_of(settings, devices, others)
    if old == "ddp":
        replicas, shards = replicas * shards, 1
    etp = settings.integer(ETP, None, "etp")
    ring = settings.word(
        f"{_PARALLEL}.context_parallel_rotate_method",
        "all-gather",
        {"allgather": "all-gather", "alltoall": "ring-zigzag"},
        "cp_style",
    )
    whole = settings.switch(f"{_PARALLEL}.enable_sequence_parallel", True, "sequence_parallel")
    return {
        "dp_replicate": replicas,
        "dp_shard": shards,
        "cp": cp,
        "tp": tp,
        "pp": pp,
        "ep": ep,
        "etp": etp if ep > 1 else None,
        "cp_style": ring,
        "sequence_parallel": whole,
        "async_tp": options.async_tp(settings, tp, whole),
    }


def _pipeline(settings: Settings, pp: int, model: ModelHints) -> dict[str, Any]:
    """Schedule, virtual stages and cut."""
    name = settings.text(_SCHEDULE, "1F1B", "schedule")
    if pp == 1:
        return {}
    schedule = _STAGES_OF.get(name, name)
    if schedule not in SCHEDULES or SCHEDULES[schedule].asynchronous:
        settings.refuse(_SCHEDULE, f"one of {', '.join([*SCHEDULES][:5])} is needed")
    if schedule != name:
        settings.differ(_SCHEDULE, f"it is read as {schedule}, the nearest that is known")
    each = SCHEDULES[schedule].stages_per_group
    virtual = each if each is not None else 2
    parts = settings.raw(_PARTS, "virtual_stages", "stage_cut")
    cut = None
    if isinstance(parts, list):
        inside = all(isinstance(part, list) for part in parts)
        settings.require(
            inside and len(parts) % pp == 0, _PARTS, f"lists for {pp} ranks are needed"
        )
        cut = tuple(sum(str(word).startswith("layers.") for word in part) for part in parts)
        virtual = len(parts) // pp
    per_stage = settings.integer(_PER_STAGE, None, "virtual_stages")
    if per_stage is not None and cut is None:
        virtual = _virtual(settings, per_stage, pp, model)
    if each is None or each == virtual:
        return {"schedule": schedule, "virtual_stages": virtual, "stage_cut": cut}
    settings.refuse(_SCHEDULE, f"{each} stages a rank are needed, and there are {virtual}")


def _virtual(settings: Settings, per_stage: int, pp: int, model: ModelHints) -> int:
    """Stages of a rank, of the layers of a stage; embedding and output count as layers."""
    name = f"{_PARALLEL}.pipeline_parallel"
    first = settings.integer(f"{name}_first_stage_less_layers", 1, "virtual_stages", least=0)
    last = settings.integer(f"{name}_last_stage_less_layers", 1, "virtual_stages", least=0)
    settings.require(
        model.layers is not None,
        _PER_STAGE,
        "the number of layers is needed too, so a model of the flavor table",
    )
    stages = math.ceil(((model.layers or 0) + first + last) / per_stage)
    settings.require(stages % pp == 0, _PER_STAGE, f"{stages} stages are not divided by {pp} ranks")
    return stages // pp


def _sequences(settings: Settings, ranks: int, pp: int) -> tuple[Batch, int]:
    """The batch of a config that counts sequences, and its micro-batches."""
    local = settings.integer(_LOCAL, 8, "batch", "micro_batches")
    whole = settings.integer(_GLOBAL, -1, "batch", "micro_batches", least=-1)
    samples = whole if whole > 0 else local * ranks
    steps = micro_batches(settings, _GLOBAL, samples, local * ranks)
    parts = 1
    if pp > 1:
        size = f"{_PARALLEL}.pipeline_parallel_microbatch_size"
        counted = settings.integer(f"{_PARALLEL}.pipeline_parallel_microbatches", None, "batch")
        each = settings.integer(size, 1, "micro_batches")
        parts = counted or micro_batches(settings, size, local, each)
        settings.require(local % parts == 0, _LOCAL, f"a multiple of {parts} is needed")
        _flushes(settings, steps)
    sequence = settings.integer("training.seq_len", 2048, "batch")
    return Batch(samples=samples, micro=local // parts, sequence=sequence), steps * parts


def _tokens(settings: Settings, ranks: int, pp: int) -> tuple[Batch, int]:
    """The batch of a config that counts tokens, and its micro-batches."""
    sequence = settings.integer(_CONTEXT, 2048, "batch")
    micro = settings.integer(_MICRO_TOKENS, 16384, "batch")
    parts = settings.integer(f"{_PARALLEL}.num_pp_microbatches", 1, "micro_batches")
    parts = parts if pp > 1 else 1
    whole = settings.integer(_STEP_TOKENS, -1, "batch", "micro_batches", least=-1)
    tokens = whole if whole > 0 else micro * parts * ranks
    steps = micro_batches(settings, _STEP_TOKENS, tokens, micro * parts * ranks)
    settings.require(
        micro % sequence == 0, _MICRO_TOKENS, f"a multiple of the context of {sequence} is needed"
    )
    if pp > 1:
        _flushes(settings, steps)
    return Batch(samples=tokens // sequence, micro=micro // sequence, sequence=sequence), (
        steps * parts
    )


def _flushes(settings: Settings, steps: int) -> None:
    if steps > 1:
        settings.differences.append(
            f"gradients are accumulated over {steps} passes of the pipeline, which empties between"
            " them; a strategy fills it once"
        )
