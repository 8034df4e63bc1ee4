"""LitGPT: peaks of finetuning on A10G and A100, a table of recipes and a page of resources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml

from benchmarks.published.readers.shapes import LLAMA2, LLAMA3
from benchmarks.published.readers.snapshot import Line, Snapshot, number, tables
from benchmarks.published.row import Row

_RECIPES, _RESOURCES = "config_hub/finetune/README.md", "tutorials/resource-tables.md"
_GIB = 1e9 / 2**30  # of a GB

_NO_TIME = "runtime of the whole run"
_ADAMW_STATES = 2
_LOADING = "the peak is that of loading, for which FSDP gathers the weights of the whole model"
_TOO_LOW = "the peak is below weights, gradients and AdamW's state, which the recipe names"


def _shape(family: str, *sizes: int, head_size: int = 0) -> dict[str, Any]:
    """Layers, hidden, heads, heads of keys and values, inner width, vocabulary."""
    layers, hidden, heads, kv_heads, ffn, vocab = sizes
    return {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size or hidden // heads,
        "ffn": ffn,
        "vocab": vocab,
        "tied": False,
    }


_MISTRAL = _shape("llama", 32, 4096, 32, 8, 14336, 32000)
# `neox`: attention and MLP read the same input, a plain MLP; `gemma`: as llama with GELU.
_MODELS = {
    "falcon-7b": _shape("neox", 32, 4544, 71, 1, 18176, 65024),
    "falcon-40b": _shape("neox", 60, 8192, 128, 8, 32768, 65024),
    "gemma-2b": _shape("llama", 18, 2048, 8, 1, 16384, 256000),
    "gemma-7b": _shape("llama", 28, 3072, 16, 16, 24576, 256000, head_size=256),
    "gemma2-2b": _shape("llama", 26, 2304, 8, 4, 9216, 256000, head_size=256),
    "gemma2-9b": _shape("llama", 42, 3584, 16, 8, 14336, 256000, head_size=256),
    "llama-2-7b": LLAMA2["7B"],
    "llama-2-13b": LLAMA2["13B"],
    "llama-3-8b": LLAMA3["8B"],
    "llama-3.1-8b": LLAMA3["8B"],
    "llama-3.2-1b": LLAMA3["1B"],
    "llama-3.2-3b": LLAMA3["3B"],
    "mistral-7b": _MISTRAL,
    "mistral-7b-v0.2": _MISTRAL,
    "phi-1.5": _shape("neox", 24, 2048, 32, 32, 8192, 51200),
    "phi-2": _shape("neox", 32, 2560, 32, 32, 10240, 51200),
    "phi-3": _shape("llama", 32, 3072, 32, 32, 8192, 32064),
    "stablelm-base-alpha-3b": _shape("neox", 16, 4096, 32, 32, 16384, 50688),
    "tiny-llama": _shape("llama", 22, 2048, 32, 4, 5632, 32000),
}
# A row of recipes counts samples of a step and, of full finetuning, the ranks it shards over.
_BATCH = {
    ("gemma-2b", "full"): 16,
    ("gemma-2b", ""): 6,
    ("gemma-7b", ""): 6,
    ("gemma2-2b", ""): 6,
    ("gemma2-9b", ""): 6,
    ("llama-2-7b", "full"): 64,
    ("llama-3-8b", "full"): 64,
    ("llama-3.1-8b", "full"): 64,
    ("llama-3.2-1b", "full"): 64,
    ("llama-3.2-3b", "full"): 64,
    ("tiny-llama", "full"): 32,
}
_RANKS = {
    "gemma-2b": 4,
    "llama-2-7b": 4,
    "llama-3-8b": 4,
    "llama-3.1-8b": 4,
    "phi-2": 2,
    "stablelm-base-alpha-3b": 2,
}
_TUNING = {"full": "all"}
_ROLES = ("query", "key", "value", "projection", "mlp", "head")
_SHARED = ("falcon-7b", "phi-1.5", "phi-2")  # attention and MLP read one norm
_DEFAULT_ADAPTERS = "lora qv 8"  # of `litgpt finetune_lora`
_RENAMED = {"gemma2b": "gemma2-2b"}  # a slip of the table
_SIZED = {"7 B": "llama-2-7b", "13 B": "llama-2-13b"}
_NAMED = {"phi-1.5": "phi-1.5", "StableLM Alpha": "stablelm-base-alpha-3b", "Falcon": "falcon-40b"}
_LONGEST = {"phi": 1044, "stablelm": 1034, "llama": 1304, "falcon": 1079}  # tokens of a sample


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """The rows of both pages."""
    for line in tables(snapshot.read(_RECIPES)):
        if line.cells.get("Machine"):
            yield _recipe(snapshot, line)
    section = {}
    for number_, text in enumerate(snapshot.read(_RESOURCES).splitlines(), 1):
        if text.startswith("## "):
            section[number_] = text[3:]
    command = ""
    for line in tables(snapshot.read(_RESOURCES)):
        if line.cells.get("Size"):
            title = section[max(at for at in section if at < line.number)]
            command = line.heading if "finetune" in line.heading else command
            yield _resource(snapshot, line, title, command)


def _recipe(snapshot: Snapshot, line: Line) -> Row:
    cells = line.cells
    folder, file = cells["Config"].split("/")
    name, tuning = _RENAMED.get(folder, folder), file.removesuffix(".yaml")
    machine = int(cells["Machine"].split("x")[0])
    ranks = min(machine, _RANKS.get(name, 1)) if tuning == "full" else 1
    given = _BATCH.get((name, tuning if tuning == "full" else ""), 8)
    row = Row(
        source="litgpt",
        path=_RECIPES,
        commit=snapshot.commit,
        line=line.number,
        model=name,
        **_MODELS[name],
        tuning=_adapters(snapshot, f"{name}/{file}")
        if tuning == "lora"
        else _TUNING.get(tuning, tuning),
        sequence=int(cells["Max seq length"]),
        global_batch=given,
        micro_batch=int(cells["Micro batch size"]),
        dp_shard=ranks,
        zero=3 if ranks > 1 else 0,
        reshard=ranks > 1,
        precision="pure-bf16",
        loss="float32",
        norms=_norms(name),
        reduce="bf16",
        recompute="full" if ranks > 1 else "none",
        optimizer="adamw-foreach",
        gpu="A10G",
        gpus=ranks,
        gpus_per_node=4,
        **_memory(cells["Peak memory"]),
        note=f"{cells['Machine']}; {_NO_TIME}: {cells['Training runtime']}",
    )
    return replace(row, excluded=_TOO_LOW) if _is_too_low(row) else row


def _adapters(snapshot: Snapshot, config: str) -> str:
    """The adapters of a recipe: which linear layers have them, and their rank."""
    path = f"config_hub/finetune/{config}".lower()  # names of the page are in lower case
    (file,) = (one for one in snapshot.files("config_hub/finetune") if one.lower() == path)
    given = yaml.safe_load(snapshot.read(file))
    roles = {role for role in _ROLES if given[f"lora_{role}"]}
    known = {frozenset({"query", "value"}): "qv", frozenset(_ROLES): "all"}
    return f"lora {known[frozenset(roles)]} {given['lora_r']}"


def _is_too_low(row: Row) -> bool:
    """Whether a rank's share of weights, gradients and AdamW's state takes more than the peak.

    All of them are bfloat16 in these recipes.
    """
    least = 2 * (2 + _ADAMW_STATES) * row.parameters / row.gpus / 2**30
    return row.tuning == "all" and row.memory_gib is not None and row.memory_gib < least


def _resource(snapshot: Snapshot, line: Line, title: str, command: str) -> Row:
    cells = line.cells
    model = cells["Model"]
    name = _NAMED.get(model) or _SIZED.get(cells["Size"], "")
    if "Inference" in title:
        excluded = "inference"
    elif cells["Max GPU RAM"] == "N/A":
        excluded = "not run"
    else:
        excluded = ""
    gpus = int(cells.get("GPU", "1").split()[0])
    if gpus > 1 and not excluded:
        excluded = _LOADING
    quantized = cells["Quantization"] != "None"
    method = "lora" if "LoRA" in title else "adapter_v2" if "v2" in command else "adapter"
    family = next((kind for kind in _LONGEST if name.startswith(kind)), "llama")
    memory = {} if excluded else _memory(cells["Max GPU RAM"])
    return Row(
        source="litgpt",
        path=_RESOURCES,
        commit=snapshot.commit,
        line=line.number,
        excluded=excluded,
        model=f"{model} {cells['Size']}",
        **_MODELS.get(name, {}),
        tuning=f"q{method}" if quantized else _DEFAULT_ADAPTERS if method == "lora" else method,
        norms=_norms(name),
        sequence=_LONGEST[family],
        global_batch=128,
        micro_batch=int(cells.get("Microbatch size", "0")),
        dp_shard=gpus,
        zero=3 if gpus > 1 else 0,
        reshard=gpus > 1,
        precision="pure-bf16",
        loss="float32",
        reduce="bf16",
        recompute="none",
        optimizer="adamw-foreach",
        gpu="A100-40",
        gpus=gpus,
        **memory,
        note=f"{cells['Quantization']}, " + cells.get("Time 1k iterations", "no time"),
    )


def _norms(name: str) -> str:
    """Of Llama's kind they are composed of single operators."""
    if _MODELS.get(name, {}).get("family") == "llama":
        return "composed"
    return "shared" if name in _SHARED else "fused"


def _memory(cell: str) -> dict[str, Any]:
    if cell == "OOM":
        return {"verdict": "out of memory"}
    return {"memory_gib": round(number(cell) * _GIB, 3), "memory_kind": "allocated"}
