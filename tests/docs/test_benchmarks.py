"""Figures of the benchmarks' page come from the committed results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import page, record
from benchmarks.checkpointing import page as checkpointing
from benchmarks.curves import page as curves
from benchmarks.efficiency import page as efficiency
from benchmarks.kills import page as kills
from benchmarks.lost_host import page as lost_host
from benchmarks.mutants import page as mutants
from benchmarks.never_worse import page as never_worse
from benchmarks.record import digest
from benchmarks.search import page as search
from benchmarks.soybean import page as soybean
from benchmarks.soybean_cuts import page as soybean_cuts
from benchmarks.spectrain_accuracy import page as accuracy
from benchmarks.spectrain_accuracy import plot
from benchmarks.spectrain_equality import page as equality
from benchmarks.spectrain_speed import page as speed
from benchmarks.starting import page as starting
from benchmarks.wide import memory_page as memory
from benchmarks.wide import planned_page as planned
from benchmarks.wide import speed_page as splits


def test_pages_are_what_the_results_give():
    pages = page.pages()
    assert {path.name for path in pages} >= {"benchmarks.md", "async.md"}
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.name}: run python -m benchmarks.page"


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


def test_a_folder_may_have_several_pages(tmp_path, monkeypatch):
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "speed_page.py").touch()
    file = tmp_path / "wide" / "speed.json"
    file.write_text(json.dumps({**ORIGIN, "rows": LOCAL}))
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    found = page.written()
    assert f"## {splits.TITLE}" in found and "`benchmarks/wide/speed.json`" in found
    file.unlink()
    assert splits.TITLE not in page.written()


def test_every_section_names_its_command_and_file():
    sections = page.PAGE.read_text().split("\n## ")[1:]
    assert sections
    for section in sections:
        ((name, _),) = re.findall(r"`benchmarks/(\w+)/(\w+)\.json`", section)
        assert f"benchmarks.{name}." in section


ORIGIN = {"command": "python -m benchmarks.wide.speed", "date": "2026-01-02", "commit": "0" * 40}
ORIGIN |= {"machine": {"cores": 2, "processor": "X"}, "versions": {"torch": "2.13"}}
WITH = {"mesh": "dp=8 tp=8", "step_seconds": 0.5, "peak_bytes": 2**35}
WITH |= {"splits": ["batch to experts"], "at_least": 0.375, "with_any_memory": 0.25}
PUBLISHED = {"model": "Mixtral-8x7B", "split": "experts", "batch": 128, "length": 2048}
PUBLISHED |= {"memory_limit": 80 * 2**30, "chosen": WITH}
BOUNDS = {"at_least": 0.625, "with_any_memory": 0.5625}
MEASURED = {
    "chosen_seconds": 0.1,
    "other_seconds": 0.2,
    "ratio": 0.5,
    "ratio_quartiles": [0.4, 0.6],
}
LOCAL = [
    {"model": "experts", "memory_limit": 2**30, "chosen": WITH, "other": WITH}
    | {"measured": MEASURED},
    {"model": "vocabulary", "memory_limit": 2**20, "chosen": {"least_bytes": 2**21}},
    {"model": "sequence", "memory_limit": 2**21, "chosen": WITH, "other": {"least_bytes": 2**22}},
]
COUNTED = [
    {"part": "logits", "devices": n, "plan": WITH, "logits_bytes": 2**21, "counted_bytes": size}
    for n, size in ((1, 2**23), (2, 2**22))
]
ROW = {"seconds": {"ours": 0.25}, "ratios": {"DDP": [1.5, 2.25, 3.5]}, "bit_per_s": 1e8}
ROW |= {"model": "alexnet", "scale": 0.25, "batch": 64, "hosts": 4}
CLOCK = {"ours_seconds": 0.1, "by_hand_seconds": 0.2, "ratio": 0.5, "ratio_quartiles": [0.4, 0.6]}
CHOICE = {"machine": "8xH100", "chosen": "searched (dp=8)", "gap": 0.0125}
BYTES = {f"{kind}, bytes": 2.5e9 for kind in ("data parallel", "model parallel", "k-cut", "joint")}
CUTS = BYTES | {"devices": 4} | {f"{kind}, processor seconds": 0.5 for kind in ("k-cut", "joint")}
MESHES = {"search of every mesh": {"wall_seconds": 2.25, "processor_seconds": 2.0}}
MESHES |= {"meshes": 6, "peak_resident_gib": 0.5}
DISTANCE = {"most_above_optimum": 0.001, "bound_most_below_optimum": 0.002}
DISTANCE |= {"search_processor_seconds": 0.75, "program_processor_seconds": 90.0}


EQUAL = {"stages": 4, "optimizer": "adamw", "weights": "stash", "compared": 912, "different": 3}
EQUAL |= {"last_loss": 2.25}
FAST = {"model": "vgg16", "against": "ddp", "hosts": 4, "gbit_per_s": 0.1, "seconds_other": 9.0}
FAST |= {"seconds_async": 1.0, "times_faster": 9.0, "every_round": [8.5, 9.25], "target": 8.91}


def learned(weights, stages, loss, **more):
    row = {"subject": "lstm", "optimizer": "adamw", "weights": weights, "stages": stages}
    return {**row, "held_out": loss, "spread": 0.1, "diverged": 0, "curve": [3.0] * 16, **more}


LEARNED = {
    "options": {"seeds": 5, "steps": 16},
    "rows": [
        learned("synchronous", 1, 2.125),
        learned("stale", 4, 2.625, gap_closed=0.0),
        learned("spectrain", 4, 2.25, gap_closed=0.75),
    ],
    "prediction_errors": {
        "adamw": {"stale": [1.0, 2.0], "linear": [0.5, 3.0], "decayed": [0.5, 1.0]}
    },
}


def test_pictures_say_what_they_are_drawn_from(tmp_path):
    plot.draw(LEARNED, tmp_path)
    names = {plot.CURVES: "rows", plot.ERRORS: "prediction_errors"}
    folders = [(tmp_path, LEARNED)]
    record = page.FOLDER / "spectrain_accuracy" / "result.json"
    if record.exists():
        folders.append((page.DOCS / "pictures", json.loads(record.read_text())))
    for folder, result in folders:
        for name, part in names.items():
            drawn = (folder / name).read_text()
            assert digest(result[part]) in drawn, f"{folder}: run with --plot-only"
    assert digest(LEARNED["rows"][1:]) not in (tmp_path / plot.CURVES).read_text()


ROUND = {"seconds": 5.25, "ratio": 1.0312, "ratio_quartiles": [1.01, 1.05]}
CURVE = {"bound": 1e-9, "steps": 40, "first": 5.5, "last": 3.25}
KILLED = {"kills": 9, "kills_by_moment": {"while saving": 4, "after a step": 5}, "resumed": 8}
KILLED |= {"steps": 100, "same_curve": True, "torn_checkpoints": [], "passed_over": 0}
KILLED |= {
    "runs": [{"plan": "pipeline", "kills": 5}, {"plan": "pipeline", "kills": 4}],
    "stood_still": ["shardwright: no step was done"],
}
MUTANTS = {"rooms": {"solve": {"tried": 8, "killed": 6, "explained": 1, "left": 1}}}
MUTANTS["rooms"]["solve"]["killed at first"] = 5
MUTANTS |= {"drawn": 9, "mutants": [{"name": "a.py: 1 -> 2", "verdict": "survived", "reason": ""}]}
STARTED = {"built": {"peak_bytes": 3e8}, "saved": {"peak_bytes": 2e7}, "loaded": {"peak_bytes": 0}}
STARTED = {"ranks": [{"share_bytes": 270e6, **STARTED}]}
LOST = {"link": "1 Gbit/s", "stall_seconds": 20.0, "every_step_once": True, "bound": 1e-9}


@pytest.mark.parametrize(
    "body, result, line",
    [
        (
            soybean.body,
            {"rows": [ROW]},
            "| alexnet x 0.25, batch 64 | 4 | 0.1 | 250 | 2.25 (1.50 to 3.50) |",
        ),
        (
            splits.body,
            {"rows": LOCAL},
            "| experts, 1024 MiB | batch to experts | 100.0 | 200.0 | 0.500 (0.400 to 0.600) |",
        ),
        (splits.body, {"rows": LOCAL}, "| vocabulary, 1 MiB | no plan fits |  |  |  |"),
        (splits.body, {"rows": LOCAL}, "| sequence, 2 MiB | batch to experts |  | none fits |  |"),
        (memory.body, {"rows": COUNTED}, "| 2 | batch to experts | 4.00 | 2.00 |"),
        (
            planned.body,
            {"planned_for": "8x8xH100"}
            | {"rows": [PUBLISHED | {"without": BOUNDS | {"least_bytes": 2**37}}]},
            "| no experts |  | none fits |  | 128.0 at least | 0.62 | 0.56 |",
        ),
        (
            planned.body,
            {"planned_for": "8x8xH100", "rows": [PUBLISHED | {"without": WITH | BOUNDS}]},
            "* Mixtral-8x7B: faster than every plan without the experts split, whatever memory that"
            " takes.",
        ),
        (
            planned.body,
            {"planned_for": "8x8xH100"}
            | {
                "rows": [
                    PUBLISHED
                    | {"chosen": WITH | {"splits": []}, "without": WITH}
                    | {"forced": WITH | {"step_seconds": 0.625}}
                ]
            },
            "* Mixtral-8x7B: the fastest plan splits no experts and takes 0.50 s; the fastest that"
            " does takes 0.62 s.",
        ),
        (
            efficiency.body,
            {
                "target": 1.02,
                "rows": [{"model": "mlp", "strategy": "sharded", "wall": CLOCK, "cpu": CLOCK}],
            },
            "| mlp, sharded | 100.0 | 200.0 | 0.500 (0.400 to 0.600) | 0.500 |",
        ),
        (
            never_worse.body,
            {
                "models": 1,
                "rows": [CHOICE | {"ratio": ratio} for ratio in (0.5, 0.75, 1.0, None)],
            },
            "| 8xH100 | 4 | 0.500 | 0.750 | 1.000 | 0 | 1.25% |",
        ),
        (
            soybean_cuts.body,
            {"models": {"mlp": [CUTS]}},
            "| mlp | 4 | 2.500 | 2.500 | 2.500 | 2.500 | 0.50 | 0.50 |",
        ),
        (
            search.body,
            {"machine planned for": "8x8xH100", "rows": {"llama": MESHES}, "aims": []},
            "| llama | 6 | 2.25 | 0.50 |",
        ),
        (
            search.distances,
            {"command": "run", "date": "today", "commit": "0" * 40, "rows": {"gpt2": DISTANCE}},
            "| gpt2 | 0.100% | 0.200% | 0.75 | 90.0 |",
        ),
        (
            equality.body,
            {"steps": 200, "rows": [EQUAL]},
            "| 4 stages, adamw, stash | 912 | 3 | 2.250000 |",
        ),
        (
            speed.body,
            {"rows": [FAST]},
            "| vgg16, DDP | 4 | 0.1 | 9.000 | 1.000 | 9.00 (8.50 to 9.25) | 8.91 |",
        ),
        (
            accuracy.details,
            LEARNED,
            "| lstm, adamw | 4 | spectrain | 2.250 ± 0.100 | 75% |  |  |",
        ),
        (
            accuracy.body,
            LEARNED,
            "* Half of the gap on the language models, `spectrain`: met in 1 of 1 (lstm adamw N = 4"
            " 75%).",
        ),
        (
            accuracy.body,
            LEARNED,
            "* Best predictor at N = 4 within a standard deviation of synchronous training: 0 of 1"
            " (deviations above it: lstm adamw spectrain +1.2).",
        ),
        (
            accuracy.details,
            LEARNED,
            "Predictions are nearer than the stale weights: linear ones with adamw at 1 of 2"
            " distances, decayed ones with adamw at 2 of 2 distances.",
        ),
        (
            checkpointing.body,
            {"rounds": 8, "every": 50, "checkpoint_bytes": 92e6, "target_ratio": 1.05}
            | {"no checkpoint": {"seconds": 5.0}, "in the background": ROUND, "waited for": ROUND},
            "| in the background | 5.25 | 1.031 (1.010 to 1.050) |",
        ),
        (
            starting.body,
            {"model_bytes": 2.1e9, "ranks": 2, "allowed_over_share_bytes": 131e6}
            | {"rows": [{"strategy": "tp=2", "over_share_bytes": {"built": 30e6}, **STARTED}]},
            "| tp=2 | 270 | 300 | 30 | 20 |",
        ),
        (
            curves.body,
            {"runs": {"float64": {**CURVE, "largest_difference": {"pipeline on 2": 3.4e-12}}}},
            "| pipeline on 2 | 3.4e-12 |",
        ),
        (kills.body, {**KILLED, "left_aside": []}, "| in all | 9 |"),
        (kills.body, {**KILLED, "left_aside": []}, "| pipeline | 9 |"),
        (mutants.body, MUTANTS, "| in all | 8 | 5 | 6 | 1 | 1 |"),
        (mutants.body, MUTANTS, "* `a.py: 1 -> 2`: survived, and not explained yet"),
        (
            kills.body,
            {**KILLED, "same_curve": False, "left_aside": ["a"]},
            "Ranks resumed 8 times, and the 100 steps ended with OTHER LOSSES. Checkpoints that"
            " were torn: 0; that had to be passed over: 0; files left behind: 1. Starts or steps"
            " that stood still, were named and ended: 1.",
        ),
        (
            lost_host.body,
            {**LOST, "largest_difference": 2e-13}
            | {"told": [{"what": "it comes back", "seconds": 61.26, "checkpoint": 30}]},
            "| it comes back | 61.3 | 30 |",
        ),
    ],
)
def test_tables_show_what_was_measured(body, result, line):
    assert line in body(result).splitlines()


def test_a_result_that_is_continued_is_no_change_beside_it(monkeypatch):
    told = {"status": "M benchmarks/soybean/result.json\n M benchmarks/page.py\n?? new.json"}
    monkeypatch.setattr(record, "_git", lambda *args: told.get(args[0], ""))
    result = record.ROOT / "benchmarks" / "soybean" / "result.json"
    assert record.provenance(0, result)["changed_files"] == 2
    assert record.provenance(0, Path("elsewhere.json"))["changed_files"] == 3
