"""vTrain: iterations of Megatron-LM on 2 to 512 A100, two CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from benchmarks.published.readers.shapes import GPT2_VOCAB, megatron, padded
from benchmarks.published.readers.snapshot import Snapshot
from benchmarks.published.row import Row

_FILES = ("data/ground_truth_single.csv", "data/ground_truth_multi.csv")


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """A row for each line of both files."""
    for path in _FILES:
        text = snapshot.read(path).lstrip("\ufeff")
        yield from _of(text, path, snapshot.commit)


def _of(text: str, path: str, commit: str) -> Iterator[Row]:
    lines = csv.DictReader(text.splitlines(), skipinitialspace=True)
    for number, line in enumerate(lines, 2):
        cells = {name.removeprefix("# ").strip(): value for name, value in line.items()}
        hidden, heads = int(cells["hidden size"]), int(cells["attention heads"])
        layers, milliseconds = int(cells["layers"]), float(cells["iteration time (ms)"])
        tp = int(cells["tensor parallelism"])
        yield Row(
            source="vtrain",
            path=path,
            commit=commit,
            line=number,
            model=f"GPT {layers}x{hidden}",
            **megatron(layers, hidden, heads, padded(GPT2_VOCAB, tp)),
            sequence=int(cells["sequence length"]),
            global_batch=int(cells["global batch"]),
            micro_batch=int(cells["micro batch"]),
            dp_replicate=int(cells["data parallelism"]),
            tp=tp,
            pp=int(cells["pipeline parallelism"]),
            schedule="1F1B" if int(cells["pipeline parallelism"]) > 1 else "",
            precision="fp16",
            reduce="fp16",
            recompute="full",
            attention="unfused",
            loss="in place",
            dropout=0.1,
            optimizer="adamw-fused",
            gradient_buffers=True,
            gpu="A100-80",
            gpus=int(cells["GPUs"]),
            network_gbit=800,
            metric="milliseconds",
            published=milliseconds,
            step_seconds=milliseconds / 1e3,
        )
