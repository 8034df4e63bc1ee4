"""What docs/architecture.md shows is what docs/tour.py prints."""

import importlib.util
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"<!-- stage: ([a-z ]+) -->\n(?:\n```text\n.*?\n```\n)?", re.S)


def tour_stages():
    spec = importlib.util.spec_from_file_location("tour", ROOT / "docs" / "tour.py")
    tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tour)
    return dict(tour.stages())


def test_the_page_shows_every_stage_of_the_tour_as_it_is_printed():
    stages, page = tour_stages(), PAGE.read_text()

    def block(found):
        return f"<!-- stage: {found[1]} -->\n\n```text\n{stages[found[1]]}\n```\n"

    expected = BLOCK.sub(block, page)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(expected)
    assert page == expected, "rerun with UPDATE_GOLDEN=1 and read the diff"
    assert [found[1] for found in BLOCK.finditer(page)] == list(stages)
