import errno
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from shardwright.cli import main
from shardwright.ir.plan import PlanError

ROOT = Path(__file__).parents[3]


def test_help_lists_every_command(shardwright_command):
    result = shardwright_command("--help")
    assert result.exit_code == 0
    for name in ("plan", "frontier", "explain", "verify", "run"):
        assert name in result.stdout


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_has_help_and_json(shardwright_command, name):
    result = shardwright_command(name, "--help")
    assert result.exit_code == 0
    assert ("--json" in result.stdout) == (name != "explore")  # which serves a page
    assert main.commands[name].help


def test_the_version_is_told_where_it_is_installed(shardwright_command, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: {"shardwright": "7.8.9"}[name])
    assert shardwright_command("--version").stdout == "shardwright 7.8.9\n"


def test_the_version_is_told_in_a_source_tree(shardwright_command, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    number = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    result = shardwright_command("--version")
    assert result.exit_code == 0
    assert result.stdout == f"shardwright {number}, not installed, run in {ROOT}\n"


def test_without_a_command_help_is_shown(shardwright_command):
    result = shardwright_command()
    assert result.exit_code == 2
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("fly",), "No such command 'fly'"),
        (("explain", "p.json", "--fast"), "No such option '--fast'"),
        (("run", "x", "--plan", "p.json"), "'--plan'. Give PLAN as an argument: "),
        (("plan", "x", "--gpus", "8"), "'--gpus'. Use --machine: Preset such as 8xH100"),
        (("run", "x", "--gpus", "8"), "'--gpus'. Use --devices: "),
        (("price", "x", "--seq-len", "8"), "'--seq-len'. Use --seq: "),
        (("explain",), "Missing argument 'PLAN'"),
    ],
)
def test_unknown_words_are_one_line(mistake, arguments, message):
    assert message in mistake(*arguments)


def test_our_errors_become_one_line_even_when_they_have_several(plan_file, monkeypatch, mistake):
    def load(path):
        raise PlanError("first\n  second")

    monkeypatch.setattr("shardwright.cli.commands.plan_files.explain.load_plan", load)
    assert mistake("explain", plan_file) == "shardwright: first second"


def test_a_bug_keeps_its_traceback(plan_file, monkeypatch, shardwright_command):
    def load(path):
        raise ValueError("not ours")

    monkeypatch.setattr("shardwright.cli.commands.plan_files.explain.load_plan", load)
    result = shardwright_command("explain", plan_file)
    assert isinstance(result.exception, ValueError)


def test_a_full_disk_is_no_traceback(plan_file, monkeypatch, mistake):
    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shardwright.cli.commands.plan_files.explain.print_plan", full)
    assert "cannot write: No space left on device; make room" in mistake("explain", plan_file)


def test_interruption_is_no_traceback(plan_file, monkeypatch, shardwright_command):
    def load(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwright.cli.commands.plan_files.explain.load_plan", load)
    result = shardwright_command("explain", plan_file)
    assert result.exit_code == 130
    assert result.stderr.strip().endswith("shardwright: interrupted")


def test_the_command_line_starts_without_torch():
    code = "import sys, shardwright.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"
