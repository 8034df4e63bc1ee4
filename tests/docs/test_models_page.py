"""The page of models: every model has a row, and what is wrong with one is found out."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from tests.zoo import ZOO
from tests.zoo.assignments import MESHES, Error
from tests.zoo.page import HEADINGS, RUNS, Row, read, stale, write
from tests.zoo.published import KINDS, Published, described
from tests.zoo.strategies import STRATEGIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
GOOD = Published(
    "plain", 7, dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0), (0.0, ""), "dp=8"
)
NONE = {
    **{(mesh, kind): Error(1e-16, "loss") for mesh in MESHES for kind in RUNS},
    (STRATEGIES[0], "strategy"): Error(1e-16, "loss", 0.9),
    (STRATEGIES[1], "strategy"): Error(1e-16, "loss", 0.1),
}


def test_every_model_has_a_row():
    rows = read(PAGE)
    assert len(ZOO) >= 90
    assert list(rows) == list(ZOO), "run `make models`"
    assert {len(row) for row in rows.values()} == {len(HEADINGS)}


@pytest.mark.parametrize(
    "plan, errors, trouble",
    [
        (GOOD, NONE, ""),
        ("CaptureError: no", NONE, "planning failed: CaptureError: no"),
        (GOOD, "PlanError: no", "verifying failed: PlanError: no"),
        (GOOD, {**NONE, ("a=2", "plan"): Error(2e-8, "loss")}, "error 2.0e-08 on a=2 at loss"),
        (GOOD, {**NONE, ("a=2", "random"): Error(float("nan"), "x")}, "error nan on a=2 at x"),
        (
            GOOD,
            {**NONE, (STRATEGIES[0], "strategy"): Error(0.0, "", 0.4)},
            "dp_shard=4 splits 40% of the multiply-adds",
        ),
        (
            GOOD,
            {**NONE, (STRATEGIES[1], "strategy"): Error(0.0, "", 0.0)},
            "dp_shard=2 tp=2 splits 0% of the multiply-adds",
        ),
    ],
)
def test_a_row_says_what_is_wrong(plan, errors, trouble):
    row = Row.of("vit", plan, errors)
    assert row.trouble == trouble
    assert len(row.cells) == len(HEADINGS)


def test_only_what_is_the_same_on_every_machine_is_compared(tmp_path):
    page = tmp_path / "models.md"
    old = Row.of("vit", GOOD, NONE)
    write(page, {"vit": old.cells})
    assert read(page) == {"vit": old.cells}
    assert not list(stale(read(page), {"vit": old}))
    worse = {key: Error(1e-12, "loss", error.split) for key, error in NONE.items()}
    assert not list(stale(read(page), {"vit": Row.of("vit", GOOD, worse)}))
    other = Published("plain", 8, GOOD.operators, GOOD.work, GOOD.whole, "dp=8")
    assert list(stale(read(page), {"vit": Row.of("vit", other, NONE)})) == [
        "vit, operators: '7' is now '8'"
    ]
    assert list(stale(read(page), {"bert": old})) == ["bert has no row"]
    less = {**NONE, (STRATEGIES[0], "strategy"): Error(1e-16, "loss", 0.8)}
    assert list(stale(read(page), {"vit": Row.of("vit", GOOD, less)})) == [
        "vit, split by them: '90% / 10% / - / -' is now '80% / 10% / - / -'"
    ]


def test_a_row_that_is_planned_again_keeps_its_errors():
    before = Row.of("vit", GOOD, NONE).cells
    other = Published("plain", 8, GOOD.operators, GOOD.work, GOOD.whole, "dp=4 tp=2", 1.0, 2.0)
    row = Row.replanned("vit", other, before)
    assert row == Row.of("vit", other, NONE) and row.trouble == ""
    assert "not verified yet" in Row.replanned("vit", other, ()).trouble
    failed = Row.replanned("vit", "CaptureError: no", before)
    assert failed.trouble == "planning failed: CaptureError: no"


class Inverts(nn.Module):
    """Most of the work is in an operator that nothing can split."""

    def forward(self, x, y):
        return torch.linalg.inv(x @ x.t() + y).sum()


def test_work_that_nothing_can_split_is_found():
    graph = sw.capture(Inverts(), (torch.zeros(64, 2), torch.zeros(64, 64)))
    found = described(graph)
    share, op = found.whole
    assert share > 0.1 and "linalg_inv" in op and "test_models_page.py" in op
    assert found.work["replicated"] == pytest.approx(share, rel=0.1)
    trouble = Row.of("vit", found, NONE).trouble
    assert "of the multiply-adds and cannot be split" in trouble
