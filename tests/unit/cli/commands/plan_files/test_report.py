import json
import sys

import pytest

from shardwright.cli.commands.plan_files.report import _memory_of
from shardwright.machine.files.figures import machine_named
from shardwright.machine.files.loading import with_figures
from shardwright.machine.presets import preset
from shardwright.plan_io.files import load_plan, save_plan
from tests.harness import plans
from tests.harness.pages import content


@pytest.fixture
def files(tmp_path):
    front = plans.frontier()
    for name, plan in zip(("fast", "middle"), front, strict=False):
        save_plan(front.with_rivals(plan), tmp_path / f"{name}.json")
    return tmp_path / "fast.json", tmp_path / "middle.json"


def test_report_writes_one_page(files, tmp_path, shardwright_command):
    out = tmp_path / "report.html"
    result = shardwright_command("report", *files, "-o", out, "--title", "mine")
    assert result.exit_code == 0, result.exception
    assert result.stdout == f"wrote {out}, 2 plans; open it in a browser\n"
    assert "<title>mine</title>" in out.read_text()


def test_the_limit_is_that_of_the_preset(files, tmp_path, as_json):
    out = tmp_path / "report.html"
    found = as_json("report", files[0], "-o", out)
    assert found["plans"] == 1
    assert found["bytes"] == out.stat().st_size
    assert '"memory_limit":null' not in out.read_text()


def test_a_run_and_a_trace_are_shown(files, tmp_path, shardwright_command):
    run, trace, out = tmp_path / "run.json", tmp_path / "trace.json", tmp_path / "report.html"
    seen = {"predicted_step_seconds": 0.1, "measured_step_seconds": 0.2, "measured_peak_bytes": 5}
    run.write_text(json.dumps(seen))
    event = {"name": "mm", "ph": "X", "ts": 0, "dur": 1, "pid": 0, "tid": 0}
    trace.write_text(json.dumps([event]))
    save_plan(plans.timed(plans.simple()), files[0])
    asked = ("report", files[0], "-o", out, "--measured", run, "--trace", trace)
    assert shardwright_command(*asked).exit_code == 0
    text = json.dumps(content(out.read_text()), separators=(",", ":"))
    assert '"measured":[["run",0.1,0.2,null,5]]' in text
    assert '"label":"trace.json"' in text
    assert '"label":"as simulated"' in text


@pytest.mark.parametrize("option", ["--measured", "--trace"])
def test_files_of_another_kind_are_a_mistake(files, tmp_path, mistake, option):
    other, out = tmp_path / "other.json", tmp_path / "report.html"
    other.write_text("{}")
    assert "other.json is not" in mistake("report", files[0], "-o", out, option, other)
    assert "cannot read" in mistake("report", files[0], "-o", out, option, tmp_path / "none")
    assert not out.exists()


def test_without_the_library_the_extra_is_named(files, tmp_path, mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    line = mistake("report", files[0], "-o", tmp_path / "report.html")
    assert "pip install 'shardwright[report]'" in line


def test_plan_files_know_what_they_were_chosen_from(api, target, tmp_path, shardwright_command):
    out = tmp_path / "plan.json"
    shardwright_command("plan", target, "--machine", "2xcpu", "-o", out)
    rivals = load_plan(out).rivals
    assert [r.name for r in rivals] == ["", "", "data parallel", "fully sharded"]
    assert [r.step_seconds for r in rivals] == pytest.approx([0.1, 0.15, 0.09, 0.16])


def test_frontier_writes_a_page_or_a_folder(api, target, tmp_path, shardwright_command):
    page, folder = tmp_path / "front.html", tmp_path / "front"
    asked = ("frontier", target, "--machine", "4xcpu", "--devices", "2,4")
    assert shardwright_command(*asked, "-o", page).exit_code == 0
    assert json.dumps(content(page.read_text())).count('"label":') == 12
    result = shardwright_command(*asked, "-o", folder)
    assert result.stdout.endswith(f"wrote {folder}\n")
    assert sorted(file.name for file in folder.iterdir())[:6] == [
        "2-000.json",
        "2-001.json",
        "2-002.json",
        "2-003.json",  # in micro-batches, which only save memory
        "2-data-parallel.json",
        "2-fully-sharded.json",
    ]
    assert load_plan(folder / "4-000.json").devices == 4


def test_a_folder_that_cannot_be_made_is_a_mistake(api, target, tmp_path, shardwright_command):
    (tmp_path / "file").write_text("")
    asked = ("frontier", target, "--machine", "2xcpu", "-o", tmp_path / "file" / "front")
    result = shardwright_command(*asked)
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


@pytest.mark.parametrize(
    "name, gb",
    [
        ("8xH100", 83.865869414),
        ("8xH100 with memory=40GB", 38.932891136),  # without context and workspaces
        ("2 of 8xH100 with memory=40GB, overlap=0.5", 38.932891136),
        ("8xH100 with memory=40GB with context=2GB", 37.932891136),
        ("8xH100 with memory=40GB, workspace=0B", 39),
        ("two hosts", None),
        ("8xH100 with love", None),
    ],
)
def test_the_memory_of_a_changed_preset_is_known_by_its_name(name, gb):
    """A report drew no limit for plans of `--set-machine`, whose machine has another name."""
    assert _memory_of(name) == (None if gb is None else round(gb * 10**9))


def test_machines_have_such_names():
    machine = with_figures(preset("8xH100"), memory="40GB", overlap=0.5).with_devices(2)
    assert str(machine) == "2 of 8xH100 with memory=40GB, overlap=0.5"
    assert (
        machine_named(str(with_figures(machine, context="2GB"))).device
        == with_figures(machine, context="2GB").device
    )
