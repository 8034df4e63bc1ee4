"""llm-foundry: MPT models with FSDP on A100 and H100, one page of tables."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.readers.shapes import mpt
from benchmarks.published.readers.snapshot import Snapshot, number, tables
from benchmarks.published.row import Row

_PATH = "scripts/train/benchmarking/README.md"
_MODELS = {
    "125m": mpt(12, 768, 12),
    "350m": mpt(24, 1024, 16),
    "760m": mpt(24, 1536, 12),
    "1b": mpt(24, 2048, 16),
    "3b": mpt(32, 2560, 20),
    "7b": mpt(32, 4096, 32),
    "13b": mpt(40, 5120, 40),
    "30b": mpt(48, 7168, 56),
    "70b": mpt(80, 8192, 64),
}
_GPUS = {
    "h100_80gb": ("H100", 3200),
    "a100_80gb": ("A100-80", 1600),
    "a100_40gb": ("A100-40", 1600),
}
_PRECISION = {"amp_bf16": "bf16", "bf16": "bf16", "amp_fp8": "fp8-delayed"}


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """A row for each line of its tables."""
    for line in tables(snapshot.read(_PATH)):
        cells = line.cells
        gpu, network = _GPUS[cells["GPU"]]
        sequence, gpus = int(cells["SeqLen (T)"]), int(cells["# GPUs"])
        batch, published = int(cells["GlobalBatchSize"]), number(cells["Throughput (T/s)"])
        yield Row(
            source="llm-foundry",
            path=_PATH,
            commit=snapshot.commit,
            line=line.number,
            model=f"MPT {cells['Model']}",
            **_MODELS[cells["Model"]],
            sequence=sequence,
            global_batch=batch,
            micro_batch=int(cells["MicroBatchSize"]),
            dp_shard=gpus,
            zero=3,
            reshard=cells["Sharding Strategy"] == "FULL_SHARD",
            sync="every",
            precision=_PRECISION[cells["Precision"]],
            reduce="bf16" if cells["MP Mode"] == "PURE" else "fp32",
            recompute="full" if cells["Activation Checkpointing"] == "True" else "none",
            attention="flash-1",
            loss="fused",
            optimizer="adamw-foreach",
            gpu=gpu,
            gpus=gpus,
            network_gbit=network,
            metric="tokens/s",
            published=published,
            step_seconds=batch * sequence / published,
        )
