"""Rows of an own measurement: steps that `scripts.gpu_check` timed on an H100.

They are of a module, of our program of it, and of the compiled one; the prediction of the first two
is the same. Columns are those of transformers: of convolutions, channels are the width and places
of an image the sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.published.graphs import OWN
from benchmarks.published.row import Row

SOURCE = "shardwright"
MEASURED = Path(__file__).parents[1] / "gpu" / "h100.json"
_GPU = "H100"
_RUNS = ("module", "program", "compiled program")
# The sizes of `scripts.gpu_check.models.LARGE`.
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "GPT-2 124M, 16x1024": {
        "layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 3072, "vocab": 50304,
        "tied": True, "sequence": 1024, "micro_batch": 16,
    },
    "Llama 1.1B, 4x2048": {
        "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 32000,
        "sequence": 2048, "micro_batch": 4, "norms": "composed",
    },
    "Mixtral 8x0.2B, 4x1024": {
        "layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 3584, "vocab": 32000,
        "experts": 8, "chosen": 2, "sequence": 1024, "micro_batch": 4, "norms": "composed",
    },
    "BERT-large, 32x512": {
        "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 30528,
        "tied": True, "sequence": 512, "micro_batch": 32,
    },
    "ViT-large, 64x224": {
        "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "vocab": 1000,
        "sequence": 197, "micro_batch": 64,
    },
    "convolutions 256x16, 64x56": {
        "layers": 16, "hidden": 256, "heads": 1, "kv_heads": 1, "ffn": 256, "vocab": 10,
        "sequence": 3136, "micro_batch": 64,
    },
}  # fmt: skip


def own_rows(text: str) -> Iterator[Row]:
    """Of each model in the results `text`: the module, our program, and our program compiled."""
    lines, results = text.splitlines(), json.loads(text)
    found: Mapping[str, Any] = results["checks"]["predicted"]["result"]
    for model, runs in found.items():
        at = next(i for i, line in enumerate(lines) if f'"{model}"' in line)
        for run in _RUNS:
            if run not in runs:
                continue
            line = next(i for i in range(at, len(lines)) if f'"{run}"' in lines[i]) + 1
            place = results["commit"], line
            yield _row(place, model, run, runs[run])


def _row(place: tuple[str, int], model: str, run: str, measured: Mapping[str, Any]) -> Row:
    shape = _SHAPES[model]
    return Row(
        source=SOURCE,
        path="benchmarks/gpu/h100.json",
        commit=place[0],
        line=place[1],
        model=model,
        family=OWN,
        **shape,
        head_size=shape["hidden"] // shape["heads"],
        global_batch=shape["micro_batch"],
        precision="pure-bf16",
        recompute="none",
        compiled=run.startswith("compiled"),
        loss="half",
        optimizer="adamw-foreach",
        gpu=_GPU,
        metric="seconds",
        published=round(measured["seconds"], 6),
        step_seconds=round(measured["seconds"], 6),
        memory_gib=round(measured["allocated_bytes"] / 2**30, 3),
        memory_kind="allocated",
        note=run,
    )
