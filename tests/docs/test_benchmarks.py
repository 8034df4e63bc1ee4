"""Figures of the benchmarks' page come from the committed results."""

import json
import re

import pytest

from benchmarks import page
from benchmarks.efficiency import page as efficiency
from benchmarks.soybean import page as soybean


def test_the_page_is_what_the_results_give():
    assert page.PAGE.read_text() == page.written(), "run python -m benchmarks.page"


def test_a_changed_result_changes_the_page(tmp_path, monkeypatch):
    for name in ("capture", "overhead"):
        (tmp_path / name).mkdir()
        for file in ("page.py", "result.json"):
            (tmp_path / name / file).write_text((page.FOLDER / name / file).read_text())
    file = tmp_path / "capture" / "result.json"
    result = json.loads(file.read_text())
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    before = page.written()
    result["models"]["llama"]["ratio"] = 7.125
    file.write_text(json.dumps(result))
    after = page.written()
    changed = set(after.splitlines()) - set(before.splitlines())
    assert len(changed) == 1 and "7.12" in changed.pop()


def test_every_section_names_its_command_and_file():
    sections = page.PAGE.read_text().split("\n## ")[1:]
    assert sections
    for section in sections:
        (name,) = re.findall(r"`benchmarks/(\w+)/result\.json`", section)
        assert f"benchmarks.{name}." in section


ROW = {"seconds": {"ours": 0.25}, "ratios": {"DDP": [1.5, 2.25, 3.5]}, "bit_per_s": 1e8}
ROW |= {"model": "alexnet", "scale": 0.25, "batch": 64, "hosts": 4}
CLOCK = {"ours_seconds": 0.1, "by_hand_seconds": 0.2, "ratio": 0.5, "ratio_quartiles": [0.4, 0.6]}


@pytest.mark.parametrize(
    "body, result, line",
    [
        (
            soybean.body,
            {"rows": [ROW]},
            "| alexnet x 0.25, batch 64 | 4 | 0.1 | 250 | 2.25 (1.50 to 3.50) |",
        ),
        (
            efficiency.body,
            {
                "target": 1.02,
                "rows": [{"model": "mlp", "strategy": "sharded", "wall": CLOCK, "cpu": CLOCK}],
            },
            "| mlp, sharded | 100.0 | 200.0 | 0.500 (0.400 to 0.600) | 0.500 |",
        ),
    ],
)
def test_tables_show_what_was_measured(body, result, line):
    assert line in body(result).splitlines()
