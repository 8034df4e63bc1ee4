"""The README's first screen: its code runs, and prints what is shown below it."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
FIRST = re.compile(r"```python\n(.*?)```\n\n<!-- output -->\n(?:\n```text\n.*?\n```\n)?", re.S)


@pytest.mark.hf
def test_the_first_example_prints_what_is_shown():
    readme = README.read_text()
    found = FIRST.search(readme)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(found[1], "README.md", "exec"), {})
    text = printed.getvalue().rstrip()
    shown = f"```python\n{found[1]}```\n\n<!-- output -->\n\n```text\n{text}\n```\n"
    expected = readme[: found.start()] + shown + readme[found.end() :]
    if os.environ.get("UPDATE_GOLDEN"):
        README.write_text(expected)
    assert readme == expected, "rerun with UPDATE_GOLDEN=1 and read the diff"
