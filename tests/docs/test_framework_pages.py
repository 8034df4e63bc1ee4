"""Pages on configs of other frameworks show the files of `examples/configs` and real output.

In a page, `<!-- KIND -->` stands before a block that a command writes: the last `shardwright audit`
above it, whose options decide what it is.

output: what the command prints.
written: what it prints on the file of `-o`, from "wrote" on.
file: the text of that file; in a block of the language `diff`, the lines that were changed.
config FRAMEWORK SEQUENCES TOKENS STRATEGY: no command's, but the file of `plan --for FRAMEWORK` for
    a plan of this strategy and batch.
"""

import difflib
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli import main
from shardwright.frameworks.config import Batch
from shardwright.frameworks.writers.nearest import ConfigFacts
from shardwright.frameworks.writing import WRITERS, write_config
from shardwright.ir.strategy.strategy import Strategy

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
PAGES = [HOW_TO / "audit.md", *sorted((HOW_TO / "frameworks").iterdir())]
FILES = sorted((ROOT / "examples" / "configs").iterdir())
PARTS = re.compile(
    r"^\$ shardwright audit (?P<arguments>[^\n]*)$"
    r"|^<!-- (?P<kind>output|written|file|config [^\n]*) -->\n\n"
    r"```(?P<language>\w+)\n(?P<shown>.*?)^```$",
    re.M | re.S,
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_page_shows_each_example(file):
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```(?:toml|bash|yaml|json)\n(.*?)^```", text, re.M | re.S)
    assert file.read_text() in blocks
    assert f"$ shardwright audit examples/configs/{file.name}" in text


def test_a_page_shows_what_plan_writes_for_each_framework():
    text = "".join(page.read_text() for page in PAGES)
    shown = set(re.findall(r"^<!-- config (\S+) ", text, re.M))
    assert shown | {"torchtitan-0.3"} == set(WRITERS)  # torchtitan's with sequences for tokens
    assert all(f"--for {framework}" in text for framework in shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_pages_show_is_what_commands_write(page, tmp_path, monkeypatch):
    """Words exactly, figures of prices only in kind: each change of a cost would move them.

    `UPDATE_GOLDEN=1` writes what is printed into the page.
    """
    shutil.copytree(ROOT / "examples" / "configs", tmp_path / "examples" / "configs")
    monkeypatch.chdir(tmp_path)
    text, end, count = page.read_text(), 0, 0
    new = printed = ""
    arguments: list[str] = []
    for part in PARTS.finditer(text):
        if part["arguments"] is not None:
            arguments, printed = shlex.split(part["arguments"]), ""
            continue
        if not (printed or part["kind"].startswith("config ")):
            done = CliRunner().invoke(main, ["audit", *arguments])
            assert done.exit_code == 0, done.output
            printed = done.stdout
        written = _written(part["kind"], part["language"], arguments, printed)
        count += 1
        if os.environ.get("UPDATE_GOLDEN"):
            start, stop = part.span("shown")
            new, end = new + text[end:start] + written, stop
        else:
            same = _without_figures if "--machine" in arguments else str
            assert same(written) == same(part["shown"]), part["kind"]
    assert count > 0
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(new + text[end:])


def carried_out(page):
    """The command lines of a page whose output is compared here."""
    found, line = set(), ""
    for part in PARTS.finditer(page.read_text()) if page in PAGES else ():
        if part["arguments"] is not None:
            line = f"audit {part['arguments']}"
        elif not part["kind"].startswith("config "):
            found.add(line)
    return found


def _written(kind: str, language: str, arguments: list[str], printed: str) -> str:
    if kind.startswith("config "):
        _, framework, samples, sequence, strategy = kind.split(" ", 4)
        batch = Batch(samples=int(samples), sequence=int(sequence))
        written = write_config(framework, Strategy.parse(strategy), ConfigFacts(batch=batch))
        assert not written.reasons
        return written.text
    if kind == "output":
        assert len(printed.splitlines()) <= 25 or "--all" in arguments
        return printed
    if kind == "written":
        return printed[printed.index("wrote ") :]
    before, after = Path(arguments[0]).read_text(), Path(arguments[arguments.index("-o") + 1])
    if language != "diff":
        return after.read_text()
    lines = difflib.unified_diff(before.splitlines(), after.read_text().splitlines(), n=0)
    return "".join(f"{line}\n" for line in lines if not line.startswith(("---", "+++", "@@")))


def _without_figures(text):
    return re.sub(r"[\d.,]+", "#", re.sub(r" +", " ", text))
