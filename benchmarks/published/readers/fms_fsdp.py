"""fms-fsdp: Llama 2 with FSDP on 128 A100 and 96 H100, the table of its README at two commits."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.readers.shapes import LLAMA2
from benchmarks.published.readers.snapshot import Line, Snapshot, number, tables
from benchmarks.published.row import Row, step_seconds

_PATH = "README.md"
_EAGER = "3759b766711f0af75fc05d50dddb313baa90c425"  # the last commit with figures without compile
_GPUS = (("A100 80G", "A100-80", 128, 400), ("H100 96", "H100", 96, 800))
_SEQUENCE = 4096


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """The rows of the snapshot, and of the commit before its figures were measured with compile."""
    yield from _of(snapshot)
    yield from _of(snapshot.at(_EAGER))


def _of(snapshot: Snapshot) -> Iterator[Row]:
    for line in tables(snapshot.read(_PATH)):
        for title, gpu, gpus, network in _GPUS:
            column = next((name for name in line.cells if title in name and "tokens" in name), None)
            if column is not None:
                yield _row(snapshot, line, column, gpu, gpus, network)


def _row(snapshot: Snapshot, line: Line, column: str, gpu: str, gpus: int, network: int) -> Row:
    cells = line.cells
    size, local = cells["Model Size"].upper(), int(cells["Batch Size"])
    hybrid = cells["Sharding Strategy"] == "HSDP"
    recompute = cells["Activation Checkpointing"]
    selective = recompute == "Selective AC"
    value = number(cells[column])
    return Row(
        source="fms-fsdp",
        path=_PATH,
        commit=snapshot.commit,
        line=line.number,
        excluded="the part of the layers that is recomputed is not stated" if selective else "",
        model=f"Llama 2 {size}",
        **LLAMA2[size],
        sequence=_SEQUENCE,
        global_batch=local * gpus,
        micro_batch=local,
        dp_replicate=gpus // 8 if hybrid else 1,
        dp_shard=8 if hybrid else gpus,
        zero=3,
        reshard=True,
        precision="bf16",
        reduce="bf16",
        recompute={"No AC": "none", "Full AC": "full"}.get(recompute, "unstated"),
        compiled=cells.get("Compile") == "Y",
        norms="composed",
        loss="half",
        optimizer="adamw-foreach",
        gpu=gpu,
        gpus=gpus,
        network_gbit=network,
        metric="tokens/s/gpu",
        published=value,
        step_seconds=step_seconds("tokens/s/gpu", value, local * gpus * _SEQUENCE, gpus),
    )
