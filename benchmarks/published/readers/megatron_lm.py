"""Megatron-LM: times and peaks that its functional tests of GPT have recorded.

Each test has a file of flags and a file of recorded values for each kind of GPU. A flag that is
neither translated nor listed as one that costs nothing excludes the test. Files of one test and
kind of GPU whose peaks differ were not recorded with the same attention, which no flag names: their
peaks are left out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import yaml

from benchmarks.published.readers.shapes import GPT2_VOCAB, megatron
from benchmarks.published.readers.snapshot import Snapshot
from benchmarks.published.row import Row

_FOLDER = "tests/functional_tests/test_cases/gpt"
_GPUS = {"dgx_a100": "A100-80", "dgxa100": "A100-80", "dgx_h100": "H100", "dgx_gb200": "GB200"}
_SAME = 1.1  # quotient of peaks of one configuration, at most
_DROPOUT = 0.1  # of embeddings, residuals and attention, where no flag says it
_RECORDED = ("iteration-time", "mem-max-allocated-bytes")
# Flags that become columns.
_SHAPE = """num-layers hidden-size num-attention-heads seq-length max-position-embeddings vocab-size
    vocab-file merge-file tokenizer-type untie-embeddings-and-output-weights micro-batch-size
    global-batch-size tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    num-layers-per-virtual-pipeline-stage sequence-parallel use-distributed-optimizer
    recompute-granularity recompute-method recompute-num-layers transformer-impl attention-backend
    attention-dropout hidden-dropout bf16 fp16 overlap-grad-reduce"""
# Flags that change no shape of the step, or only names, data, logs, checkpoints and rates.
_FREE = """accumulate-allreduce-grads-in-fp32 adam-beta1 adam-beta2 adam-eps
    apply-query-key-layer-scaling async-save async-strategy attention-softmax-in-fp32
    auto-detect-ckpt-format bias calculate-per-token-loss ckpt-assume-constant-structure
    ckpt-format ckpt-fully-parallel-load ckpt-fully-parallel-save clip-grad data-cache-path
    data-path decoupled-lr decoupled-min-lr deterministic-mode disable-bias-linear
    disable-gloo-process-groups dist-ckpt-optim-fully-reshardable dist-ckpt-strictness
    distributed-backend distributed-timeout-minutes eval-interval eval-iters exit-interval
    expert-tensor-parallel-size fim-data fim-rate fim-spm-rate init-method-std load
    log-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
    log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard lr
    lr-decay-iters lr-decay-style lr-warmup-fraction lr-warmup-samples manual-gc min-lr
    mock-data no-ckpt-fully-parallel-save no-create-attention-mask-in-dataloader
    no-gradient-accumulation-fusion no-mmap-bin-files async-ckpt-use-cpu-shm
    overlap-param-gather rerun-mode save save-interval seed split
    tensorboard-dir timing-log-level train-iters use-checkpoint-opt_param-scheduler
    use-mcore-models use-persistent-ckpt-worker use-tp-pp-dp-mapping weight-decay"""
_KNOWN = frozenset((*_SHAPE.split(), *_FREE.split()))


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """A row for each file of recorded values."""
    listed = snapshot.files(_FOLDER)
    found = []
    for path in listed:
        folder, _, name = path.rpartition("/")
        config = f"{folder}/model_config.yaml"
        if name.startswith("golden_values") and name.endswith(".json") and config in listed:
            found.append(_row(snapshot, path, config))
    yield from _without_contradictions(found)


def _without_contradictions(found: Sequence[Row]) -> Iterator[Row]:
    """The rows without peaks that differ between files of one test and one kind of GPU."""
    peaks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in found:
        if row.memory_gib is not None and not row.excluded:
            peaks[row.model, row.gpu].append(row.memory_gib)
    for row in found:
        known = peaks.get((row.model, row.gpu), [0.0])
        if row.memory_gib is not None and max(known) > _SAME * min(known):
            note = f"a peak of {row.memory_gib} GiB, where another file of the test has another"
            row = replace(row, memory_gib=None, memory_kind="", note=note)
        yield row


def _row(snapshot: Snapshot, path: str, config: str) -> Row:
    text = yaml.safe_load(snapshot.read(config)).get("MODEL_ARGS") or {}
    flags = {str(flag).removeprefix("--"): value for flag, value in text.items()}
    test, name = path.split("/")[-2:]
    common: dict[str, Any] = {
        "source": "megatron-lm",
        "path": path,
        "commit": snapshot.commit,
        "line": 1,
    }
    common["model"] = test
    gpu = next((kind for word, kind in _GPUS.items() if word in name), "")
    values = _recorded(snapshot.read(path))
    reason = _reason(name, gpu, flags, values)
    if reason:
        return Row(**common, gpu=gpu, excluded=reason)
    gpus = 4 if test.endswith("_1node") else 8
    return Row(**common, **_columns(flags, gpus), **_published(flags, values), **_hosts(gpu, gpus))


def _recorded(text: str) -> dict[str, float]:
    """The median time and the highest peak of a file, where it has them."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return {}
    found = {}
    for name in _RECORDED:
        entry = content.get(name) if isinstance(content, dict) else None
        steps = (entry.get("values") or {}).values() if isinstance(entry, dict) else ()
        values = [float(one) for one in steps]
        finite = [one for one in values if math.isfinite(one)]
        if finite:
            found[name] = median(finite) if name == "iteration-time" else max(finite)
    return found


def _reason(name: str, gpu: str, flags: Mapping[str, Any], values: Mapping[str, float]) -> str:
    """Why a file is no row; empty where it is one."""
    unknown = sorted(flags.keys() - _KNOWN)
    if not values:
        return "no times and no peaks are recorded"
    if not gpu:
        return "the GPU is not stated"
    if "_2nd" in name:
        return "the same run, after it was resumed"
    if "global-batch-size" not in flags:
        return "no training with a fixed global batch"
    if unknown:
        return f"no column for the flag {unknown[0]}"
    if flags.get("attention-dropout", _DROPOUT) != flags.get("hidden-dropout", _DROPOUT):
        return "other dropout of attention than of residuals"
    if flags.get("recompute-granularity") not in (None, "full"):
        return "recomputation other than of whole layers"
    return ""


def _columns(flags: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    def of(name: str, default: int = 1) -> int:
        return int(flags.get(name, default))

    tp, pp, cp = (of(f"{n}-parallel-size") for n in ("tensor-model", "pipeline-model", "context"))
    vocab, multiple = of("vocab-size", GPT2_VOCAB), 128 * tp
    shape = megatron(
        of("num-layers"),
        of("hidden-size"),
        of("num-attention-heads"),
        -(-vocab // multiple) * multiple,
    )
    dp, sharded = gpus // (tp * pp * cp), bool(flags.get("use-distributed-optimizer"))
    virtual = "num-layers-per-virtual-pipeline-stage"
    stages = of("num-layers") // (pp * of(virtual)) if virtual in flags else 1
    unfused = flags.get("attention-backend") == "unfused" or flags["transformer-impl"] == "local"
    half = "fp16" if flags.get("fp16") else "bf16"
    return {
        **shape,
        "tied": not flags.get("untie-embeddings-and-output-weights"),
        "sequence": of("seq-length"),
        "global_batch": of("global-batch-size"),
        "micro_batch": of("micro-batch-size"),
        "dp_shard" if sharded else "dp_replicate": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "zero": 1 if sharded else 0,
        "sequence_parallel": bool(flags.get("sequence-parallel")),
        "virtual_stages": stages,
        "schedule": "" if pp == 1 else "Interleaved1F1B" if stages > 1 else "1F1B",
        "precision": half,
        "reduce": "fp16" if half == "fp16" else "fp32",
        "recompute": "full" if "recompute-granularity" in flags else "none",
        "attention": "unfused" if unfused else "fused",
        "loss": "in place",
        "dropout": float(flags.get("hidden-dropout", _DROPOUT)),
        "optimizer": "adamw-fused",
        "gradient_buffers": True,
        "overlapped": bool(flags.get("overlap-grad-reduce")),
    }


def _published(flags: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """The time, and the peak where the rank that records it is like all others."""
    time, peak = (values.get(name) for name in _RECORDED)
    found: dict[str, Any] = {}
    if time is not None:
        found |= {"metric": "seconds", "published": time, "step_seconds": time}
    if peak is not None and int(flags.get("pipeline-model-parallel-size", 1)) == 1:
        found |= {"memory_gib": round(peak / 2**30, 3), "memory_kind": "allocated"}
    return found


def _hosts(gpu: str, gpus: int) -> dict[str, Any]:
    return {"gpu": gpu, "gpus": gpus, "gpus_per_node": 4 if gpu == "GB200" else 8}
