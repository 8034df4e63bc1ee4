"""calculon: figures of Korthikanti et al. (arXiv 2205.05198) that its validation compares with."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.published.readers.shapes import megatron
from benchmarks.published.readers.snapshot import Snapshot
from benchmarks.published.row import Row

_PATH = "calculon/llm/validation.py"
_VOCAB = 51200
_RECOMPUTE = {"none": "none", "full": "full", "attn_only": "attention"}
_ANALYTIC = "a figure that the paper computes with its formulas, not a measurement"


def rows(snapshot: Snapshot) -> Iterator[Row]:
    """A row for each time and each figure of memory in the tables of its validation."""
    for function in ast.walk(ast.parse(snapshot.read(_PATH))):
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("seqsel_"):
            continue
        for assigned in ast.walk(function):
            if isinstance(assigned, ast.Assign) and _is_named(assigned, "kProfile"):
                yield from _of(snapshot, function.name.split("_")[1], assigned.value)


def _is_named(assigned: ast.Assign, name: str) -> bool:
    return isinstance(assigned.targets[0], ast.Name) and assigned.targets[0].id == name


def _of(snapshot: Snapshot, figure: str, table: ast.expr) -> Iterator[Row]:
    assert isinstance(table, ast.Dict)
    for model, modes in zip(table.keys, table.values, strict=True):
        assert isinstance(modes, ast.Dict)
        for mode, value in zip(modes.keys, modes.values, strict=True):
            assert isinstance(model, ast.Constant)
            assert isinstance(mode, ast.Constant)
            given = _run(snapshot, figure, str(model.value), str(mode.value))
            found = ast.literal_eval(value)
            if figure == "tab5":
                given |= {"metric": "seconds", "published": found, "step_seconds": found}
                yield Row(line=value.lineno, **given)
            else:
                what = "activations relative to tensor parallelism" if figure == "fig7" else "GiB"
                note = f"{what}: {found}"
                yield Row(line=value.lineno, excluded=_ANALYTIC, note=note, **given)


def _run(snapshot: Snapshot, figure: str, model: str, mode: str) -> dict[str, Any]:
    shape = json.loads(snapshot.read(f"models/{model}.json"))
    run = json.loads(snapshot.read(f"validation/seqsel/{figure}/{model}_{mode}.json"))
    pp, stages = run["pipeline_par"], run["pipeline_interleaving"]
    return {
        "source": "calculon",
        "path": _PATH,
        "commit": snapshot.commit,
        "model": model,
        **megatron(shape["num_blocks"], shape["hidden"], shape["attn_heads"], _VOCAB),
        "sequence": shape["seq_size"],
        "global_batch": run["batch_size"],
        "micro_batch": run["microbatch_size"],
        "dp_replicate": run["data_par"],
        "tp": run["tensor_par"],
        "pp": pp,
        "virtual_stages": stages,
        "schedule": "" if pp == 1 else "Interleaved1F1B" if stages > 1 else "1F1B",
        "sequence_parallel": run["tensor_par_comm_type"] == "rs_ag",
        "precision": "fp16",
        "reduce": "fp16",
        "recompute": _RECOMPUTE[run["activation_recompute"]],
        "attention": "unfused",
        "loss": "in place",
        "optimizer": "adamw-fused",
        "gradient_buffers": True,
        "gpu": "A100-80",
        "gpus": run["num_procs"],
        "network_gbit": 1600,
    }
