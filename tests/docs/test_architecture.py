"""What pages of docs show of the tour's stages is what docs/tour.py prints."""

import importlib.util
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "explanation" / "step-program.md",
]
BLOCK = re.compile(r"<!-- stage: ([a-z ]+) -->\n(?:\n```text\n.*?\n```\n)?", re.S)


def tour_stages():
    spec = importlib.util.spec_from_file_location("tour", ROOT / "docs" / "tour.py")
    tour = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tour)
    return dict(tour.stages())


def test_pages_show_every_stage_of_the_tour_as_it_is_printed():
    stages = tour_stages()

    def block(found):
        return f"<!-- stage: {found[1]} -->\n\n```text\n{stages[found[1]]}\n```\n"

    shown = []
    for path in PAGES:
        page = path.read_text()
        expected = BLOCK.sub(block, page)
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(expected)
        assert page == expected, f"{path}: rerun with UPDATE_GOLDEN=1 and read the diff"
        shown += [found[1] for found in BLOCK.finditer(page)]
    assert sorted(shown) == sorted(stages)
