"""Megatron-LM's flags: shell scripts, command lines and the YAML of its test cases."""

from __future__ import annotations

from typing import Any

from shardwright.frameworks.config import Batch, ModelHints
from shardwright.frameworks.documents.document import Document
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.readers import megatron_options as options
from shardwright.frameworks.readers.megatron_pipeline import pipeline
from shardwright.frameworks.readers.understood import (
    MICRO,
    STEP,
    Given,
    Understood,
    devices_of,
    micro_batches,
    rest_of,
)
from shardwright.frameworks.settings import Settings
from shardwright.ir.strategy.fields import AXES, TP_PP_DP

FLAGS, TEST_CASE, CONFIG = "command-line flags", "YAML of MODEL_ARGS", "YAML of flags"
_MODEL_ARGS = "MODEL_ARGS."
KNOWN = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "use-distributed-optimizer")
_UNAFFECTING = {
    "changes when communication happens, not the strategy": (
        "overlap-grad-reduce overlap-param-gather delay-wgrad-compute"
        " overlap-param-gather-with-optimizer-step moe-token-dispatcher-type"
    ),
    "the kernels of attention, not the strategy": "use-flash-attn attention-backend",
    "the number of query groups says it": "group-query-attention",
    "the model that is priced has the same matrices": (
        "max-position-embeddings normalization norm-epsilon position-embedding-type rotary-base"
        " rotary-percent no-position-embedding qk-layernorm make-vocab-size-divisible-by"
    ),
    "the launch, not the strategy": (
        "master_addr master_port node_rank master-addr master-port node-rank rdzv-id rdzv-backend"
        " rdzv-endpoint"
    ),
    "training, not the strategy": (
        "lr min-lr lr-decay-style lr-warmup-samples lr-decay-samples weight-decay adam-beta1"
        " adam-beta2 train-iters train-samples lr-warmup-fraction lr-decay-iters lr-warmup-iters"
        " seed init-method-std attention-dropout hidden-dropout tokenizer-type tokenizer-model"
        " data-path split save load save-interval eval-interval eval-iters log-interval"
    ),
}


def recognises(document: Document) -> bool:
    """Whether a file holds Megatron-LM's flags."""
    names = {_named(key) for key in document.entries}
    in_yaml = document.form == "yaml" and any(
        key.startswith((_MODEL_ARGS, "--")) for key in document.entries
    )
    return (document.form == "flags" or in_yaml) and any(name in names for name in KNOWN)


def _named(key: str) -> str:
    """The name of a flag, with dashes; of a line of an MPI or SLURM header, as it is."""
    if key.startswith(("#", "$")):
        return key
    inner = key.removeprefix(_MODEL_ARGS)
    return inner.removeprefix("--").replace("_", "-")


def settings_of(document: Document) -> Settings:
    """The flags by name, without dashes in front."""
    return Settings(document, _named)


def read(settings: Settings, given: Given) -> Understood:
    """The strategy of Megatron-LM's flags."""
    flags = settings.document.form == "flags"
    test_case = any(key.startswith(_MODEL_ARGS) for key in settings.document.entries)
    dialect = FLAGS if flags else TEST_CASE if test_case else CONFIG
    return understood(settings, given, dialect, _world(settings))


def _world(settings: Settings) -> int | None:
    """The ranks of the job: of torchrun's options, or of a SLURM header."""
    for each, nodes in (
        ("nproc-per-node", "nnodes"),
        ("#SBATCH.ntasks-per-node", "#SBATCH.nodes"),
        ("#SBATCH.gpus-per-node", "#SBATCH.nodes"),
    ):
        if each in settings:
            shown = settings.text(each, "", "dp_shard"), settings.text(nodes, "1", "dp_shard")
            if all(word.isdecimal() for word in shown):
                return settings.integer(each, 1) * settings.integer(nodes, 1)
    return settings.integer("$WORLD_SIZE", None) if _plain(settings, "$WORLD_SIZE") else None


def _plain(settings: Settings, name: str) -> bool:
    return settings.text(name, "$").isdecimal()


def understood(settings: Settings, given: Given, dialect: str, in_file: int | None) -> Understood:
    """The strategy of settings under the names of Megatron-LM's flags."""
    for why, names in _UNAFFECTING.items():
        settings.unaffecting(names.split(), why)
    tp = settings.integer("tensor-model-parallel-size", 1, "tp")
    pp = settings.integer("pipeline-model-parallel-size", 1, "pp")
    cp = settings.integer("context-parallel-size", 1, "cp")
    ep = settings.integer("expert-model-parallel-size", 1, "ep")
    etp = settings.integer("expert-tensor-parallel-size", tp, "etp")
    weights = settings.integer("tensor-parallel-num-weight-shards", tp, "dp_shard")
    if weights != tp:
        settings.differ(
            "tensor-parallel-num-weight-shards",
            f"{weights // tp} ranks beside tp hold parts of its weights; read as without",
        )
    devices = devices_of(settings, given, "nproc-per-node", in_file)
    others = {
        "tensor-model-parallel-size": tp,
        "context-parallel-size": cp,
        "pipeline-model-parallel-size": pp,
    }
    dp = rest_of(settings, devices, others)
    model = _model(settings)
    batch, count = _batch(settings, dp)
    storage, recipe = options.storage(settings, dp), options.fp8(settings)
    per_token = settings.switch("calculate-per-token-loss", False, "semantics")
    fields: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp,
        "order": _order(settings, pp, etp * ep, tp * cp),
        "sequence_parallel": settings.switch("sequence-parallel", False, "sequence_parallel"),
        "async_tp": options.async_tp(settings, tp),
        "ep_overlap": options.ep_overlap(settings, ep, count),
        "cp_style": options.cp_style(settings),
        "micro_batches": count,
        **storage,
        **pipeline(settings, pp, model.layers),
        "recompute": options.recompute(settings),
        "offload": options.offload(settings),
        **options.dtypes(settings),
        "fp8": recipe,
        "fp8_gather": options.fp8_gather(settings, recipe, storage, cp),
        "compile": "off",
        "loss": options.loss(settings),
    }
    return Understood(
        dialect=dialect,
        fields=fields,
        batch=batch,
        model=model,
        loss_mean=STEP if per_token else MICRO,
        clip=settings.number("clip-grad", 1.0, "semantics") or None,
    )


def _order(settings: Settings, pp: int, experts: int, dense: int) -> tuple[str, ...]:
    """The order of the axes; raises `FrameworkError` where experts would have other stages.

    `experts` are the ranks over which experts and their features are split, `dense` those over
    which other layers are (`initialize_model_parallel` of Megatron-Core).
    """
    name = "use-tp-pp-dp-mapping"
    if not settings.switch(name, False, "order"):
        return AXES
    if pp > 1 and experts != dense:
        raise FrameworkError(
            f"{name} with a pipeline needs etp x ep, {experts}, to be tp x cp, {dense}, as"
            " Megatron-LM does; leave it out, or change the degrees"
        )
    return TP_PP_DP


def _batch(settings: Settings, dp: int) -> tuple[Batch, int]:
    micro = settings.integer("micro-batch-size", 1, "batch", "micro_batches")
    samples = settings.integer("global-batch-size", micro * dp, "batch", "micro_batches")
    if "step-batch-size-schedule" in settings:
        settings.differ("step-batch-size-schedule", "the batch grows; its last size is read")
    count = micro_batches(settings, "global-batch-size", samples, micro * dp)
    return Batch(
        samples=samples, micro=micro, sequence=settings.integer("seq-length", None, "batch")
    ), count


def _model(settings: Settings) -> ModelHints:
    """Sizes of the model."""
    whole = settings.integer
    hidden = whole("hidden-size", None, "model")
    heads = whole("num-attention-heads", None, "model")
    groups = whole("num-query-groups", None, "model")
    experts = whole("num-experts", None, "model")
    return ModelHints(
        layers=whole("num-layers", None, "model"),
        hidden=hidden,
        ffn=whole("ffn-hidden-size", hidden * 4 if hidden else None, "model"),
        heads=heads,
        key_value_heads=groups or heads,
        vocabulary=whole("vocab-size", None, "model"),
        experts=experts,
        experts_per_token=whole("moe-router-topk", 2 if experts else None, "model"),
        expert_ffn=whole("moe-ffn-hidden-size", None, "model"),
        head_dim=whole("kv-channels", None, "model"),
        feed_forward=_feed_forward(settings) if hidden else None,
        tied=not settings.switch("untie-embeddings-and-output-weights", False, "model")
        if hidden
        else None,
    )


def _feed_forward(settings: Settings) -> str:
    """The activation of the feed-forward layers, as `ModelHints` names it."""
    for name in ("swiglu", "squared-relu"):
        if settings.switch(name, False, "model"):
            return name
    return "gelu"
