"""What pages of docs show of programs is what docs/tour.py and docs/passes.py print."""

import importlib.util
import os
import re
from pathlib import Path

import pytest

from shardwright.program.step.optimize import STEP_PASSES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Each script, and the pages that show all of what it prints.
PAGES = {
    "tour": [DOCS / "architecture.md", DOCS / "explanation" / "step-program.md"],
    "passes": [DOCS / "explanation" / "passes.md"],
}
BLOCK = re.compile(r"<!-- stage: ([a-z ]+) -->\n(?:\n```text\n.*?\n```\n)?", re.S)


def printed(script):
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.stages())


@pytest.mark.parametrize("script", PAGES)
def test_pages_show_every_stage_of_a_script_as_it_is_printed(script):
    stages = printed(script)

    def block(found):
        return f"<!-- stage: {found[1]} -->\n\n```text\n{stages[found[1]]}\n```\n"

    shown = []
    for path in PAGES[script]:
        page = path.read_text()
        expected = BLOCK.sub(block, page)
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(expected)
        assert page == expected, f"{path}: rerun with UPDATE_GOLDEN=1 and read the diff"
        shown += [found[1] for found in BLOCK.finditer(page)]
    assert sorted(shown) == sorted(stages)


def test_a_page_shows_every_pass():
    shown = {found[1].replace(" ", "_") for found in BLOCK.finditer(PAGES["passes"][0].read_text())}
    assert shown == {one.__name__ for one in STEP_PASSES}


OBJECT = re.compile(r"\[`(\w+)`\]\(\.\./(shardwright/[\w/]+\.py)\)")


def undefined(page):
    """Linked names of a page that the file behind the link does not define."""
    return [
        name
        for name, file in OBJECT.findall(page)
        if not re.search(rf"^(?:class|def) {name}\b", (ROOT / file).read_text(), re.M)
    ]


def test_objects_are_where_the_page_says():
    page = (DOCS / "architecture.md").read_text()
    assert len(OBJECT.findall(page)) > 20
    assert undefined(page) == []


def test_an_object_of_another_file_is_found():
    line = "[`Plan`](../shardwright/ir/plan.py) [`Graph`](../shardwright/ir/plan.py)"
    assert undefined(line) == ["Graph"]
