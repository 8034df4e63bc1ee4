"""The guide in CONTRIBUTING: its diffs still fit the files that they are about."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def changes(text):
    """File and diff lines of every change in the guide."""
    for block in re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S):
        for part in re.split(r"^\+\+\+ b/", block, flags=re.M)[1:]:
            name, *lines = part.splitlines()
            yield name, lines


@pytest.mark.parametrize(
    "name, lines", list(changes(GUIDE)), ids=lambda v: v if type(v) is str else ""
)
def test_the_lines_that_a_diff_starts_from_are_there(name, lines):
    needed = [line[1:] for line in lines if line[0] in " -"]  # a new file needs none
    there = (ROOT / name).read_text().splitlines() if needed else []
    assert [line for line in needed if line not in there] == []


def test_paths_of_the_guide_are_there():
    prose = re.sub(r"^```diff.*?^```$", "", GUIDE, flags=re.M | re.S)
    paths = re.findall(r"(?:tests|docs|shardwright)/[\w/-]+(?:\.\w+)?", prose)
    harness = prose.partition("`tests/harness`:")[2].partition("\n\n`")[0]
    for row in re.findall(r"^\| (`.*?) \|", harness, re.M):
        paths += [f"tests/harness/{name}.py" for name in re.findall(r"`(\w+)`", row)]
    packages = prose.partition("| tests/unit/ |")[2].partition("\n\n")[0]
    paths += [f"tests/unit/{name}" for name in re.findall(r"`([\w/]+)`", packages)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
