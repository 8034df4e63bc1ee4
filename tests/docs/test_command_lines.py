"""Every command line of README and of the pages is carried out, one page after its own start.

What measures, or starts ranks, is checked as far as that and not waited for: tests of its own do.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli import main
from shardwright.cli.commands.report_measurement import SETUP
from shardwright.cli.explore.server import PageServer
from shardwright.machine.files.toml import to_toml
from shardwright.machine.presets import preset
from shardwright.train import launch
from shardwright.train.launch import Training
from shardwright.train.loop import StepRecord
from tests.docs.test_framework_pages import carried_out
from tests.docs.test_readme import ROOT, console_lines
from tests.docs.test_readme_output import CONCEPTS, README, SHOWN
from tests.ranks.test_pages import DOCS

PAGES = [README, *sorted(DOCS.rglob("*.md"))]
LINES = {page: lines for page in PAGES if (lines := console_lines(page.read_text()))}
NOT_RUN = ("profile", "doctor")  # which measure
GOLDEN = console_lines(SHOWN.search(README.read_text())[2])  # what these print is compared
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
RUN = {"predicted_step_seconds": 0.1, "measured_step_seconds": 0.2, "measured_steps": [0.2]}
RUN |= {"setup": dict.fromkeys(SETUP, "what ran")}
TRACE = {"traceEvents": [{"ph": "X", "name": "mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}]}


def test_the_config_of_the_first_page_is_one_of_the_kind_that_is_tried_here():
    block = re.search(r"```json\n(.*?)```", (DOCS / "tutorial" / "first-plan.md").read_text(), re.S)
    shown = json.loads(block[1])
    assert shown.keys() <= CONFIG.keys()
    assert {name: shown[name] for name in ("architectures", "model_type")}.items() <= CONFIG.items()
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads"):
        assert f"{name}={shown[name]}" in CONCEPTS.read_text()


class Verified:
    """What comparing with one device would say."""

    ok, notes, worst = True, (), ""
    loss_error = max_gradient_error = max_buffer_error = max_parameter_error = 0.0
    capture_error, compared_in, not_compared = 0.0, "float64", ""


def command(line):
    return CliRunner().invoke(main, shlex.split(line))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What a page may take for granted: two plans of an example, a machine, a trace."""
    folder = tmp_path_factory.mktemp("files")
    target = ROOT / "examples" / "mlp.py:job"
    for name, machine in (("plan", "8xH100"), ("other", "4xH100")):
        done = command(f"plan {target} --machine {machine} -o {folder / name}.json")
        assert done.exit_code == 0, done.output
    (folder / "machine.toml").write_text(to_toml(preset("2xcpu")))
    (folder / "mine.json").write_text(json.dumps(TRACE))
    (folder / "run.json").write_text(json.dumps(RUN))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def desk(files, tmp_path, monkeypatch):
    """A folder with such files, where ranks have finished before they start."""
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    monkeypatch.chdir(tmp_path)
    records = (StepRecord(1, 2.0, 0.04, 8, "samples", 2**20),)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: Training(0, records))
    monkeypatch.setattr(PageServer, "serve_forever", lambda _: None)
    monkeypatch.setattr("shardwright.api.verify", lambda *_, **__: Verified())
    monkeypatch.setattr(
        "shardwright.profile.measure.measure_host", lambda n, **_: preset(f"{n}xcpu")
    )


@pytest.mark.hf
@pytest.mark.parametrize("page", LINES, ids=lambda page: page.stem)
def test_the_command_lines_of_a_page_do_as_it_says(page, desk):
    elsewhere = {*GOLDEN, *carried_out(page)}
    for line in LINES[page]:
        if not line or line.split()[0] in NOT_RUN or line in elsewhere:
            continue
        words = shlex.split(line)
        written = Path(words[words.index("-o") + 1]) if "-o" in words else None
        if written is not None:
            written.unlink(missing_ok=True)
        done = command(line)
        assert done.exit_code == 0, (line, done.output, done.exception)
        assert written is None or written.exists(), line
