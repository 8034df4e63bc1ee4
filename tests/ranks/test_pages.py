"""Every block of Python of the documentation runs, one page after its own start."""

import re
from pathlib import Path

import pytest
import torch

import shardwright as sw
from tests.harness.script_ranks import run_script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Pages whose blocks without a title are parts of a longer program; tests of their subjects run it.
PARTS = ("async.md", "big-models.md", "constraints.md", "own-loop-state.md", "pipelines.md")
PAGES = sorted([*(DOCS / "tutorial").glob("*.md"), *(DOCS / "how-to").glob("*.md")])
PRINTS = {"train.py": 5, "finetune.py": 1, "lora.py": 1}  # how often a file prints a loss
BLOCK = re.compile(r"^```python(?: title=\"([^\"\n]+)\")?\n(.*?)^```$", re.M | re.S)


def blocks(page):
    """Title and text of every block of Python on a page; a block with a title is a file."""
    return BLOCK.findall(page.read_text())


def alone(page):
    """The blocks that need no beginning."""
    return [block for block in blocks(page) if block[0] or page.name not in PARTS]


@pytest.mark.parametrize("page", [p for p in PAGES if alone(p)], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__page__"}
    for title, code in alone(page):
        if not title:
            exec(compile(code, page.name, "exec"), scope)
            continue
        (tmp_path / title).write_text(code)
        lines = "".join(run_script(2, title, folder=tmp_path)).splitlines()
        written = "\n".join(line for line in lines if not line.startswith("[transformers] "))
        assert written.count("loss") == PRINTS.get(title, 0)


class Dropping(torch.nn.Module):
    """A model whose loss depends on random numbers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x, y):
        hidden = torch.nn.functional.dropout(self.up(x), 0.5)
        return torch.nn.functional.cross_entropy(self.down(hidden), y)


def test_a_resumed_loop_has_the_losses_of_one_that_never_stopped(tmp_path):
    """Without the random state, dropout drew its first masks again."""
    page = DOCS / "how-to" / "own-loop.md"
    scope, code = {}, next(code for _, code in blocks(page) if "def resume" in code)
    exec(compile(code, "own-loop.md", "exec"), scope)
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    plan = sw.plan(Dropping(), (x, y), machine="1xcpu")

    def begun():
        pm = sw.parallelize(Dropping(), plan)
        return pm, torch.optim.AdamW(pm.parameters())

    def step(pm, optimizer):
        optimizer.zero_grad()
        loss = pm(x, y)
        loss.backward()
        optimizer.step()
        return loss.item()

    first = begun()
    step(*first)
    scope["save"](*first, 1, tmp_path / "saved")
    expected = [step(*first), step(*first)]
    second = begun()
    assert scope["resume"](*second, tmp_path / "saved") == 1
    assert [step(*second), step(*second)] == expected
