"""Blocks of Python that are parts of a longer program run too, behind the beginning of one."""

import os
from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.ranks.test_pages import DOCS, ROOT, blocks

HOW_TO = DOCS / "how-to"

pytestmark = pytest.mark.ranks

_MLP = f"""
import torch
import shardwright as sw
from dataclasses import replace
from shardwright.train.targets.target import load_job

job = replace(load_job({str(ROOT / "examples" / "mlp.py:job")!r}), steps=50)
model, batch = job.model(), job.example
machine = sw.Machine.preset("2xcpu")
"""
# What comes before the blocks of a page, which then run on two ranks.
ON_RANKS = {
    ROOT / "README.md": "",
    HOW_TO / "async.md": "",
    HOW_TO / "pipelines.md": "plan = sw.plan(model, kwargs=batch, machine=machine, stages=[2])\n"
    "assert plan.stages == 2",
    HOW_TO / "own-loop-state.md": "plan = sw.plan(model, kwargs=batch, machine=machine)",
}
ALONE = {
    HOW_TO / "constraints.md": "from tests.harness.models import gpt2\n"
    "model, kwargs = gpt2(layers=1, batch=8)\n"
    "args, machine = (), sw.Machine.preset('8xH100')\n"
    "graph = sw.capture(model, args, kwargs)",
}
PARTS = (*ON_RANKS, *ALONE)


def parts(page):
    """The blocks of a page, for the machine of this test."""
    return [code.replace('machine="8xH100"', "machine=machine") for _, code in blocks(page)]


def run(page, beginning):
    """What the page's names stand for in the end."""
    scope = {"__name__": "__page__"}
    for code in (_MLP, beginning, *parts(page)):
        exec(compile(code, page.name, "exec"), scope)
    return scope


def run_all(folder):
    os.chdir(folder)
    found = {page.name: run(page, beginning) for page, beginning in ON_RANKS.items()}
    losses = [float(found[name]["loss"]) for name in ("README.md", "pipelines.md", "async.md")]
    return losses, found["own-loop-state.md"]["run"].step


def test_parts_of_programs_run_on_ranks(tmp_path):
    assert all(parts(page) for page in PARTS)
    (losses, steps), other = run_ranks(2, run_all, tmp_path)
    assert other == (losses, steps)
    assert all(0 < loss < 2 for loss in losses)
    assert steps == 50
    assert [path.name for path in Path(tmp_path, "runs", "gpt").glob("step*")]


@pytest.mark.parametrize("page", ALONE, ids=lambda page: page.stem)
def test_parts_of_programs_run(page):
    found = run(page, ALONE[page])
    assert str(found["plan"].mesh) == "dp=4 tp=2"
    assert all(plan.mesh.shape[-1] <= 4 for plan in found["front"])
