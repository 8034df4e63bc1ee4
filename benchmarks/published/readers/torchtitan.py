"""torchtitan: Llama 2 and 3 on A100, H100 and H200; pages of benchmarks and an older page.

Its tables leave most of the configuration to captions and text. What a table's caption says is
written down here; the figures come from the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.published.readers.shapes import LLAMA2, LLAMA3
from benchmarks.published.readers.snapshot import Line, Snapshot, number, tables
from benchmarks.published.row import Row, step_seconds

_2024 = "benchmarks/llama3_h100_202412_torchtitan.md"
_ASYNC_TP = "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
_H200 = "benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
# The page before it lost Llama 2; later versions have a part of its rows.
_OLD, _OLD_COMMIT = "docs/performance.md", "6a6f755d2d7fd65ea6013324ae130306a0761e2c"

_H100 = {"gpu": "H100-96", "network_gbit": 3200}  # 96 GB of HBM2e at 2.4 TB/s, 500 W
# `torch.compile` included the loss from 2025-04-02 (bbb1b616), not at the end of 2024 (e8977b00).
_OF_2025 = {"optimizer": "adamw-fused", "loss": "fused"}
_FP8 = {"compiled": True, "precision": "fp8-tensorwise"}
_8B = {"model": "Llama 3.1 8B", **LLAMA3["8B"]}
_70B = {"model": "Llama 3.1 70B", **LLAMA3["70B"]}
_405B = {"model": "Llama 3.1 405B", **LLAMA3["405B"]}
_RECOMPUTE = {
    "no": "none",
    "selective layer": "every 2nd layer",
    "selective op": "operators",
    "full": "full",
}


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """The rows of three pages, and of the older page at its commit."""
    for reader in (_of_2024, _of_async_tp, _of_h200):
        yield from reader(snapshot)
    yield from _of_old(snapshot.at(_OLD_COMMIT))


def _row(snapshot: Snapshot, path: str, line: Line, published: str, **given: Any) -> Row:
    """A row; its batch is `local_batch` times the data parallel ranks unless it is given."""
    local = given.pop("local_batch")
    given.setdefault("dp_shard", given["gpus"])
    given.setdefault("micro_batch", local)
    given.setdefault("optimizer", "adamw-foreach")  # its default until 2025
    tokens = local * given["dp_shard"] * given["sequence"]
    memory = given.pop("memory", "")
    value = number(published)
    return Row(
        source="torchtitan",
        path=path,
        commit=snapshot.commit,
        line=line.number,
        global_batch=local * given["dp_shard"],
        zero=3,
        reshard=given.get("pp", 1) == 1,
        reduce="fp32",
        norms="composed",
        metric="tokens/s/gpu",
        published=value,
        step_seconds=step_seconds("tokens/s/gpu", value, tokens, given["gpus"]),
        memory_gib=number(memory) if memory else None,
        memory_kind="reserved" if memory else "",
        **given,
    )


def _of_2024(snapshot: Snapshot) -> Iterator[Row]:
    for line in tables(snapshot.read(_2024)):
        cells = line.cells
        if "TPS/GPU" not in cells:
            continue  # the table of versions
        table = int(number(line.heading.split("**Table")[1]))
        given = _table_of_2024(table, cells)
        memory = cells["Memory(GiB)"]
        yield _row(snapshot, _2024, line, cells["TPS/GPU"], memory=memory, **_H100, **given)


def _table_of_2024(table: int, cells: dict[str, str]) -> dict[str, Any]:
    """What the captions of its six tables say, and the first cells of a row."""
    if table in (1, 3):
        how = cells["Techniques"]
        return {
            **_8B,
            "gpus": 8 if table == 1 else 128,
            "sequence": 8192,
            "local_batch": 2,
            "recompute": "operators",
            "compiled": "compile" in how,
            "precision": "fp8-tensorwise" if "Float8" in how else "bf16",
        }
    if table == 2:
        fsdp, cp = (int(number(part)) for part in cells["Parallelism"].split(","))
        return {
            **_8B,
            **_FP8,
            "gpus": 8,
            "dp_shard": fsdp,
            "cp": cp,
            "sequence": int(cells["Sequence Length"]),
            "local_batch": 1,
            "recompute": "full",
        }
    if table == 4:
        return {
            **_70B,
            **_FP8,
            "gpus": 256,
            "dp_shard": 32,
            "tp": 8,
            "sequence_parallel": True,
            "sequence": 8192,
            "local_batch": 16,
            "recompute": "full",
            "async_tp": "AsyncTP" in cells["Techniques"],
        }
    return _pipelines_of_2024(table, cells)


def _pipelines_of_2024(table: int, cells: dict[str, str]) -> dict[str, Any]:
    """The same of the two tables with pipelines, 5 and 6."""
    given = {
        **_405B,
        **_FP8,
        "gpus": 512,
        "tp": 8,
        "pp": 8,
        "sequence_parallel": True,
        "recompute": "full",
        "async_tp": True,
        "micro_batch": 1,
    }
    if table == 5:
        interleaved = cells["Schedule"].startswith("Interleaved")
        return {
            **given,
            "dp_shard": 8,
            "sequence": 8192,
            "local_batch": 32,
            "schedule": "Interleaved1F1B" if interleaved else "1F1B",
            "virtual_stages": 2 if interleaved else 1,
            "note": "micro-batches of 1 assumed"
            + ("; 2 stages a rank assumed" if interleaved else ""),
        }
    fsdp, cp = (int(number(part)) for part in cells["Parallelism"].split(","))
    return {
        **given,
        "dp_shard": fsdp,
        "cp": cp,
        "sequence": int(cells["Sequence Length"]),
        "local_batch": 8,
        "schedule": "1F1B",
        "note": "micro-batches of 1 assumed",
    }


def _of_async_tp(snapshot: Snapshot) -> Iterator[Row]:
    for line in tables(snapshot.read(_ASYNC_TP)):
        cells = line.cells
        if "Quantization" not in cells:
            continue
        kind = cells["Quantization"]
        precision = "bf16" if kind.startswith("None") else f"fp8-{kind.split()[1]}"
        big = "70b" in line.heading
        common = {
            **(_70B if big else _8B),
            "gpus": 256 if big else 64,
            "dp_shard": 32 if big else 8,
            "tp": 8,
            "sequence_parallel": True,
            "sequence": 8192,
            "local_batch": 16 if big else 12,
            "recompute": "full" if big else "operators",
            "compiled": True,
            "precision": precision,
            "fp8_gather": "" if precision == "bf16" else "off",  # as in the files that it names
            "note": "sequence of 8192 assumed: the recipe's",
        }
        for overlapped, name in ((False, "Vanilla TP"), (True, "Async TP")):
            yield _row(
                snapshot,
                _ASYNC_TP,
                line,
                cells[f"{name} tokens/sec"],
                async_tp=overlapped,
                **_OF_2025,
                **_H100,
                **common,
            )


def _of_h200(snapshot: Snapshot) -> Iterator[Row]:
    for line in tables(snapshot.read(_H200)):
        if "TPS/GPU" not in line.cells:
            continue
        yield _row(
            snapshot,
            _H200,
            line,
            line.cells["TPS/GPU"],
            memory=line.cells["Memory(GiB)"],
            gpus=8 * int(line.cells["NUM_NODES"]),
            gpu="H200",
            **_OF_2025,
            network_gbit=3200,
            sequence=8192,
            local_batch=2,
            recompute="operators",
            fp8_gather="on",  # as the command says
            **_8B,
            **_FP8,
        )


def _of_old(snapshot: Snapshot) -> Iterator[Row]:
    """Four tables: Llama 3.1 405B on 128 H100; Llama 3 and Llama 2 on 64 A100."""
    headings = {
        number: line[3:]
        for number, line in enumerate(snapshot.read(_OLD).splitlines(), 1)
        if line.startswith("## ")
    }
    for line in tables(snapshot.read(_OLD)):
        section = headings[max(at for at in headings if at < line.number)]
        cells = line.cells
        size, local = cells["Model size"], int(cells["Batch size"].split("[")[0])
        given: dict[str, Any] = {
            "local_batch": local,
            "recompute": _RECOMPUTE[cells["Activation checkpointing"]],
            "precision": "bf16",
        }
        if "3.1" in section:
            how = cells["Optimizations"]
            given |= {**_405B, **_H100, "gpus": 128, "dp_shard": 16, "tp": 8, "sequence": 8192}
            given |= {"sequence_parallel": True, "compiled": True, "async_tp": "Async" in how}
            given |= {"precision": "fp8-tensorwise" if "Float8" in how else "bf16"}
            given |= {"note": "compile assumed"}
        else:
            third = "Llama 3 " in section
            shape = (LLAMA3 if third else LLAMA2)[size]
            given |= {**shape, "model": f"Llama {3 if third else 2} {size}", "gpus": 64}
            given |= {"gpu": "A100-80", "network_gbit": 1600, "sequence": 8192 if third else 4096}
            given |= {"note": "network assumed: 8 x 200 Gbit/s"}
        yield _row(snapshot, _OLD, line, cells["WPS"], **given)
