"""Examples of README and of the concepts: what is shown below them is what they print."""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONCEPTS = ROOT / "docs" / "explanation" / "concepts.md"
BODY = r"((?:(?!```).)*)```\n"  # of a block, to its end
SHOWN = re.compile(
    rf"```(console|python)\n{BODY}\n<!-- output -->\n(?:\n```text\n{BODY})?", re.DOTALL
)


def printed(language, code):
    """What an example prints: a command of the program, or a block of Python."""
    if language == "console":
        done = CliRunner().invoke(main, shlex.split(code.removeprefix("$ shardwright ")))
        assert done.exit_code == 0, done.output
        return done.stdout
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        exec(compile(code, "example", "exec"), {})
    return page.getvalue()


@pytest.mark.hf
@pytest.mark.parametrize("page", [README, CONCEPTS], ids=lambda page: page.stem)
def test_an_example_prints_what_is_shown(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = page.read_text()
    found = SHOWN.search(before)
    language, code = found[1], found[2]
    text = printed(language, code).strip()
    shown = f"```{language}\n{code}```\n\n<!-- output -->\n\n```text\n{text}\n```\n"
    expected = before[: found.start()] + shown + before[found.end() :]
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(expected)
    assert before == expected, "rerun with UPDATE_GOLDEN=1 and read the diff"
