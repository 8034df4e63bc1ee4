"""The pages on configs of other frameworks show the files of `examples/configs` and real output."""

import os
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


@pytest.mark.parametrize("number", [0, 1])
def test_the_audits_that_are_explained_are_what_is_printed(monkeypatch, number):
    """Words exactly, figures of prices only in kind: each change of a cost would move them.

    `UPDATE_GOLDEN=1` writes what is printed into the page.
    """
    monkeypatch.chdir(ROOT)
    page = (PAGES / "audit.md").read_text()
    shown = list(re.finditer(r"<!-- output: (.*?) -->\n\n```text\n(.*?)```", page, re.S))
    assert len(shown) == 2
    done = CliRunner().invoke(main, ["audit", *shlex.split(shown[number][1])])
    assert done.exit_code == 0, done.exception
    assert len(done.stdout.splitlines()) <= 25
    if os.environ.get("UPDATE_GOLDEN"):
        start, end = shown[number].span(2)
        (PAGES / "audit.md").write_text(page[:start] + done.stdout + page[end:])
    else:
        same = _without_figures if "--machine" in shown[number][1] else str
        assert same(done.stdout) == same(shown[number][2])


def _without_figures(text):
    return re.sub(r"[\d.,]+", "#", re.sub(r" +", " ", text))
