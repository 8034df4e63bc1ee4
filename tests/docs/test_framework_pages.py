"""The pages on configs of other frameworks show the files of `examples/configs` and real output."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli import main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-to"
FILES = sorted((ROOT / "examples" / "configs").iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_page_shows_each_example(file):
    page = (PAGES / "frameworks.md").read_text()
    blocks = re.findall(r"^```(?:toml|bash|yaml|json)\n(.*?)^```", page, re.M | re.S)
    assert file.read_text() in blocks
    assert f"$ shardwright audit examples/configs/{file.name}" in page


def test_the_audit_that_is_explained_is_what_is_printed(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (PAGES / "audit.md").read_text()
    shown = re.search(r"<!-- output: (.*?) -->\n\n```text\n(.*?)```", page, re.S)
    done = CliRunner().invoke(main, ["audit", *shlex.split(shown[1])])
    assert done.exit_code == 0, done.exception
    assert done.stdout == shown[2]
