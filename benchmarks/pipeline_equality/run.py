"""Every synchronous schedule, two and four groups alone and of two devices each, four models.

    python -m benchmarks.pipeline_equality.run             # a quarter of an hour on two idle cores
    python -m benchmarks.pipeline_equality.run --world 2   # the cases on two ranks; not written

Losses, gradients and buffers of two steps in float64 against one device, as in
tests/ranks/test_pipelines.py, which takes some of these cases. What is done is kept in
result.rows, to go on later.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import record
from shardwright.ir.layout import Mesh
from tests.harness.pipelines import Subject
from tests.harness.ranks import run_ranks

HERE = Path(__file__).parent
MESHES = {
    2: ("pp=2 dp=1",),
    4: ("pp=2 dp=2", "pp=2 tp=2", "pp=4 dp=1"),
    8: ("pp=4 dp=2", "pp=4 tp=2"),
}
SCHEDULES = (
    ("GPipe", 1),
    ("1F1B", 1),
    ("Interleaved1F1B", 2),
    ("InterleavedZeroBubble", 1),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
)
WHOLE = ("resnet", "unet")  # batch norms over the whole batch: one micro-batch
MODELS = ("gpt2", "t5", "resnet in pieces", "unet in pieces", *WHOLE)
LIMIT_SECONDS = 1200


class Case(NamedTuple):
    """One pipeline; each group of devices has `each` stages."""

    model: str
    mesh: str
    schedule: str
    each: int
    micro_batches: int


def cases(world: int) -> Iterator[Case]:
    """All on so many ranks."""
    for mesh in MESHES[world]:
        groups = Mesh.parse(mesh).shape[0]
        for model in MODELS:
            for schedule, each in SCHEDULES:
                if model not in WHOLE:
                    yield Case(model, mesh, schedule, each, groups)
                elif schedule == "GPipe":
                    yield Case(model, mesh, schedule, each, 1)


def on_rank(subject: Any, todo: list[Case], rows: str) -> None:
    """Each case on one rank; the first writes down the worst error of all ranks."""
    meshes: dict[str, Any] = {}
    for case in todo:
        mesh = Mesh.parse(case.mesh)
        if case.mesh not in meshes:
            meshes[case.mesh] = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
        stages = mesh.shape[0] * case.each
        errors = subject.errors(mesh, case.schedule, stages, case.micro_batches, meshes[case.mesh])
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (max(errors.values()), len(errors)))
        if dist.get_rank() == 0:
            worst, compared = max(error for error, _ in every), sum(n for _, n in every)
            row = {**case._asdict(), "worst": worst, "compared": compared}
            print(row, flush=True)
            with open(rows, "a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    """Compare what is left to compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--world", type=int, nargs="+", choices=MESHES, default=tuple(MESHES))
    parser.add_argument("--rows", type=Path, default=HERE / "result.rows")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = _read(options.rows)
    for name in MODELS:
        subject = Subject(name)
        for world in options.world:
            mine = [case for case in cases(world) if case.model == name]
            if todo := [case for case in mine if case not in found]:
                run_ranks(world, on_rank, subject, todo, str(options.rows), timeout=LIMIT_SECONDS)
    found = _read(options.rows)
    if all(case in found for world in MESHES for case in cases(world)):
        rows = [found[case] for world in MESHES for case in cases(world)]
        claim = "pipelines of every schedule give what one device gives, within 1e-9"
        record.write({"claim": claim, "rows": rows}, HERE / "result.json", 0)
        options.rows.unlink()


def _read(rows: Path) -> dict[Case, dict[str, Any]]:
    lines = rows.read_text().splitlines() if rows.exists() else []
    every = [json.loads(line) for line in lines]
    return {Case(*(row[name] for name in Case._fields)): row for row in every}


if __name__ == "__main__":
    main()
