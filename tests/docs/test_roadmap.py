"""The roadmap sends contributors to files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATH = re.compile(r"`([\w.]+/[\w./]*)`")


def missing(text):
    """Paths, below the package or the repository, that a text names and that do not exist."""
    found = PATH.findall(text)
    return [p for p in found if not any((at / p).exists() for at in (ROOT, ROOT / "shardwright"))]


def test_every_path_exists():
    text = (ROOT / "docs" / "roadmap.md").read_text()
    assert PATH.search(text)
    assert missing(text) == []


def test_missing_paths_are_found():
    assert missing("Begin: `planner/lost.py`, `ir/plan.py`, `scripts/check`.") == [
        "planner/lost.py"
    ]
