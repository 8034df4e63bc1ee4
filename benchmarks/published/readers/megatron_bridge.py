"""Megatron-Bridge: pages of throughput on H100 to GB300, and peaks of recomputation choices.

Pages name the recipes that were run. What pages do not say is read from the recipe of a row's
model, GPU and precision, at the pages' commit, if that has the row's degrees and micro-batch.
CUDA graphs of whole steps are in recipes of dense models since the first release, in those of
mixtures since 26.06, as are messages of experts beside another micro-batch (commits 8af195c,
afb5dd4 and 55443cb of June 2026, tag v0.5.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.published.readers.bridge_recipes import Settings, recipe_settings
from benchmarks.published.readers.shapes import LLAMA3, MIXTURES
from benchmarks.published.readers.snapshot import Line, Snapshot, number, tables
from benchmarks.published.row import Row, step_seconds

_PAGES = ("docs/performance-summary.md", "docs/performance-summary-archive.md")
_RECOMPUTE = "skills/nemo-mbridge-perf-activation-recompute/SKILL.md"
_MEMORY = "skills/nemo-mbridge-perf-memory-tuning/SKILL.md"
_PRECISION = {
    "BF16": "bf16",
    "FP8": "fp8-tensorwise",
    "FP8-CS": "fp8-tensorwise",
    "FP8-MX": "fp8-mx",
    "MXFP8": "fp8-mx",
    "NVFP4": "nvfp4",
}
# Of its recipes of mixed precision; weights in MXFP8 are gathered in 16 bits.
_GATHERS = {"fp8-tensorwise": "on", "fp8-mx": "off"}
_DENSE = {"LLAMA3_8B": "8B", "LLAMA3_70B": "70B", "LLAMA3.1_405B": "405B"}
_NOT_DENSE = "experts or state-space layers, whose shapes no module here has"
# Of `recompute_modules`, with the names that modules have here.
_MODULES = {"mla_up_proj": "*.attention.up", "core_attn": "*attn*"}
_NO_TRAINABLE = "which parameters LoRA trains is not stated"
_GIB = 1e9 / 2**30
_MARKS = (
    ("#### Model:", "model"), ("#### System:", "system"), ("### ", "kind"), ("## ", "release"),
)  # fmt: skip
_MIXTURES_OF_NOW = "26.06"  # the first release with recipes of mixtures as they are


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """The rows of two pages of throughput and two of memory."""
    for path in _PAGES:
        yield from _page(snapshot, path)
    yield from _recompute(snapshot)
    yield from _memory(snapshot)


def _page(snapshot: Snapshot, path: str) -> Iterator[Row]:
    text = snapshot.read(path)
    headings: dict[int, dict[str, str]] = {}
    now: dict[str, str] = {}
    for at, written in enumerate(text.splitlines(), 1):
        for mark, name in _MARKS:
            if written.startswith(mark):
                now = {**now, name: written.removeprefix(mark).strip()}
                break
        headings[at] = now
    for line in tables(text):
        if "#-GPUs" in line.cells:
            yield _throughput(snapshot, path, line, headings[line.number])


def _throughput(snapshot: Snapshot, path: str, line: Line, heading: dict[str, str]) -> Row:
    cells = {name: value.split("(")[0].split("[")[0].strip() for name, value in line.cells.items()}
    model = (cells.get("Model") or heading["model"]).strip()
    system = (cells.get("System") or heading["system"]).removeprefix("DGX-")
    sequence, gpus, batch = (int(cells[n]) for n in ("Sequence Length", "#-GPUs", "GBS"))
    tp, pp, cp = (int(cells[name]) for name in ("TP", "PP", "CP"))
    sharded = int(cells.get("FSDP", "0"))
    published = number(cells["Tokens / sec / GPU"])
    tuning = "lora" if "LoRA" in heading["kind"] else "all"
    shape = LLAMA3[_DENSE[model]] if model in _DENSE else MIXTURES.get(model)
    precision = _PRECISION[cells.get("Precision", "FP8-CS")]
    virtual = int(cells["VP"]) if cells["VP"].isdigit() else 1
    row = Row(
        source="megatron-bridge",
        path=path,
        commit=snapshot.commit,
        line=line.number,
        excluded=_NOT_DENSE if shape is None else _NO_TRAINABLE if tuning == "lora" else "",
        model=model,
        **(shape or {}),
        balanced=model in MIXTURES,
        tuning=tuning,
        sequence=sequence,
        global_batch=batch,
        micro_batch=int(cells["MBS"]),
        dp_shard=gpus // (tp * pp * cp),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=int(cells["EP"]) if cells["EP"].isdigit() else 1,
        zero=3 if sharded else 1,
        reshard=bool(sharded),
        sequence_parallel=tp > 1,
        virtual_stages=virtual,
        schedule="" if pp == 1 else "Interleaved1F1B" if virtual > 1 else "1F1B",
        precision=precision,
        fp8_gather=_GATHERS.get(precision, ""),
        reduce="fp32",
        loss="in place",
        optimizer="adamw-fused",
        gradient_buffers=True,
        **_gpu(system),
        gpus=gpus,
        metric="tokens/s/gpu",
        published=published,
        step_seconds=step_seconds("tokens/s/gpu", published, batch * sequence, gpus),
        note="" if "Precision" in cells else "precision assumed",
    )
    if row.excluded:
        return row
    settings = recipe_settings(snapshot, model, system, gpus, precision)
    if settings is None or not _is_of(row, settings):
        return row
    return _as_in_recipe(row, settings, heading["release"].split(" ")[0])


def _is_of(row: Row, settings: Settings) -> bool:
    """Whether a recipe has the degrees and the micro-batch of a row."""

    def degree(name: str) -> int:
        return settings.get(f"model.{name}_parallel_size") or 1

    return (row.tp, row.pp, row.cp, row.ep, row.virtual_stages, row.micro_batch, row.zero == 3) == (
        degree("tensor_model"),
        degree("pipeline_model"),
        degree("context"),
        degree("expert_model"),
        degree("virtual_pipeline_model"),
        settings.get("train.micro_batch_size", 1),
        bool(settings.get("ddp.use_megatron_fsdp")),
    )


def _as_in_recipe(row: Row, settings: Settings, release: str) -> Row:
    offloads = settings.get("model.cpu_offloading")
    wide = settings.get("ddp.grad_reduce_in_fp32", True)
    scopes = settings.get("model.cuda_graph_impl"), *(settings.get("model.cuda_graph_scope") or ())
    is_mixture, as_now = row.model in MIXTURES, release >= _MIXTURES_OF_NOW
    beside = settings.get("comm_overlap.overlap_moe_expert_parallel_comm")
    return replace(
        row,
        recompute=_recomputed(settings),
        offloaded=settings.get("model.cpu_offloading_num_layers", 0) if offloads else 0,
        async_tp=row.tp > 1 and bool(settings.get("comm_overlap.tp_comm_overlap")),
        reduce="fp32" if wide else "bf16",
        replayed="full_iteration" in scopes and scopes[0] != "none" and (as_now or not is_mixture),
        ep_overlap=is_mixture and as_now and row.ep > 1 and row.micro_batches > 1 and bool(beside),
        overlapped=row.zero < 2 and bool(settings.get("ddp.overlap_grad_reduce")),
    )


def _recomputed(settings: Settings) -> str:
    """What a recipe recomputes, as `Row` says it."""
    granularity = settings.get("model.recompute_granularity")
    if granularity is None:
        return "none"
    if granularity == "full":
        word = "first" if settings["model.recompute_method"] == "block" else "groups"
        return f"{word}({settings['model.recompute_num_layers']})"
    modules = settings.get("model.recompute_modules", ["core_attn"])
    if not modules:
        return "none"
    if not all(name in _MODULES for name in modules):
        return "other"
    return f"modules({','.join(_MODULES[name] for name in modules)})"


def _gpu(system: str) -> dict[str, Any]:
    return {"gpu": system, "gpus_per_node": 4 if system.startswith("GB") else 8}


def _recompute(snapshot: Snapshot) -> Iterator[Row]:
    """Three tables: Moonlight 16B, Nemotron 3 Nano, Llama 3 70B."""
    for line in tables(snapshot.read(_RECOMPUTE)):
        cells = line.cells
        if "Peak allocated (GB)" in cells:
            yield _other(snapshot, line, "Moonlight 16B", cells["Peak allocated (GB)"], "")
        elif "Outcome" in cells:
            peak = cells["Rank-0 measured peak"]
            yield _other(snapshot, line, "Nemotron 3 Nano", peak, cells["Outcome"])
        elif "Configuration" in cells and "Peak memory" in cells:
            peak, modules = cells["Peak memory"], cells["Configuration"]
            if "Golden" in modules:
                yield _llama(snapshot, _RECOMPUTE, line, "", excluded="no run of its own")
            else:
                more = {"recompute": "unstated", "note": f"recomputed: {modules}"}
                if modules.startswith("`core_attn` baseline"):
                    more["recompute"] = "attention"
                else:
                    more["excluded"] = "recomputation of the MLP or of norms"
                yield _llama(snapshot, _RECOMPUTE, line, peak, **more)


def _other(snapshot: Snapshot, line: Line, model: str, peak: str, outcome: str) -> Row:
    measured = any(letter.isdigit() for letter in peak)
    return Row(
        source="megatron-bridge",
        path=_RECOMPUTE,
        commit=snapshot.commit,
        line=line.number,
        excluded=_NOT_DENSE,
        model=model,
        gpu="H100",
        memory_gib=round(number(peak) * _GIB, 3) if measured else None,
        memory_kind="allocated" if measured else "",
        verdict="out of memory" if outcome.startswith("OOM") else "ran",
        note=line.cells["Selective modules"].replace("`", ""),
    )


def _memory(snapshot: Snapshot) -> Iterator[Row]:
    for line in tables(snapshot.read(_MEMORY)):
        cells = line.cells
        if "Peak Mem (GB)" in cells:
            yield _llama(
                snapshot,
                _MEMORY,
                line,
                cells["Peak Mem (GB)"] + (" OOM" if "OOM" in cells["Result"] else ""),
                tp=int(cells["TP"]),
                pp=int(cells["PP"]),
                dp_shard=int(cells["DP"]),
                recompute="attention",
                note=f"{cells['Experiment']}; {cells['TFLOP/s/GPU']} TFLOP/s/GPU",
            )


def _llama(snapshot: Snapshot, path: str, line: Line, peak: str, **more: Any) -> Row:
    """Llama 3 70B on 32 H100: finetuning of all parameters in fp8, 5 virtual stages."""
    given = {"tp": 4, "pp": 4, "dp_shard": 2, **more}
    return Row(
        source="megatron-bridge",
        path=path,
        commit=snapshot.commit,
        line=line.number,
        model="LLAMA3_70B",
        **LLAMA3["70B"],
        sequence=4096,
        global_batch=32,
        micro_batch=1,
        zero=1,
        sequence_parallel=True,
        virtual_stages=5,
        schedule="Interleaved1F1B",
        precision="fp8-tensorwise",
        fp8_gather=_GATHERS["fp8-tensorwise"],
        reduce="fp32",
        loss="in place",
        optimizer="adamw-fused",
        gradient_buffers=True,
        gpu="H100",
        gpus=32,
        memory_gib=round(number(peak) * _GIB, 3) if peak else None,
        memory_kind="unstated" if peak else "",
        verdict="out of memory" if "OOM" in peak else "ran",
        **given,
    )
