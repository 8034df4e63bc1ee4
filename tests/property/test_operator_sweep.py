"""Entries of PyTorch's database of operators: a sample, and every entry that was once wrong.

All of it is `python scripts/coverage_operators.py`, whose findings are in `docs/operators.md`.
"""

import json
from pathlib import Path

import pytest

from tests.harness import captures
from tests.harness.ranks import run_ranks
from tests.sweep.entries import entries
from tests.sweep.sweep import check_all

FINDINGS = Path(__file__).parents[2] / "docs" / "operators.json"
EVERY = 120  # of the entries, one
ONCE_WRONG = (
    "acos",  # a tensor without elements was taken for one of one element
    "cov",
    "corrcoef",
    "gather",  # of a tensor without dimensions
    "logical_not (in place)",
    "nn.functional.gaussian_nll_loss",
    "nn.functional.pad.reflect",
    "nn.functional.prelu",
    "native_batch_norm",
    "nn.InstanceNorm1d (training)",
    "nn.BatchNorm1d (training)",
    "nn.Conv1d (training)",
    "nn.GaussianNLLLoss (training)",
    "nn.ZeroPad2d (training)",
    "torch.ops.aten._safe_softmax.default",
)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_sample_of_entries_is_exact_or_refused_in_one_line(tmp_path):
    names = [entry.name for entry in entries()]
    chosen = [*dict.fromkeys((*ONCE_WRONG, *names[::EVERY]))]
    assert set(chosen) <= set(names)
    with captures.remembered():
        run_ranks(2, check_all, chosen, str(tmp_path / "found"))
    found = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert [f["name"] for f in found] == chosen
    wrong = {f["name"]: f["texts"] for f in found if f["verdict"] in ("wrong", "crash")}
    assert not wrong, wrong
    assert sum(f["verdict"] == "exact" for f in found) > len(found) / 2
    assert sum(f["assignments"] for f in found) > 200


def test_no_finding_is_wrong_and_the_page_tells_how_many_there_are():
    found = [json.loads(line) for line in FINDINGS.read_text().splitlines()]
    names = {entry.name for entry in entries()}
    assert {f["name"] for f in found} <= names
    assert not [f["name"] for f in found if f["verdict"] in ("wrong", "crash")]
    assert f"{len(found)} of {len(names)} entries" in FINDINGS.with_suffix(".md").read_text()


def test_what_is_whole_is_not_splittable_and_what_is_refused_has_a_reason():
    for found in map(json.loads, FINDINGS.read_text().splitlines()):
        if found["verdict"] == "refused":
            assert all(text and "\n" not in text for text in found["texts"]), found["name"]
        if found["verdict"] == "exact":
            assert found["samples"] == 0 or found["assignments"] + found["known"] > 0
