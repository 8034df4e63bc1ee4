"""Figures on the pages: each is written from a result, printed by code that is run, or a source's.

Text that someone typed may say how large a bucket is, but not how fast anything was.
"""

import re
from pathlib import Path

import pytest

from benchmarks.estimates.page import written

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Written by a program from a file of results; each has a test that compares the two.
WRITTEN = {
    "benchmarks.md", "estimates.md", "models.md", "operators.md", "published.md", "tp-plans.md",
}  # fmt: skip
RECORDS = DOCS / "explanation"  # pages of what was measured when it was decided
PAGES = [
    ROOT / "README.md",
    RECORDS / "concepts.md",
    *(p for p in sorted(DOCS.rglob("*.md")) if p.name not in WRITTEN and p.parent != RECORDS),
]
# Blocks between fences; those that a test compares with what is printed are marked as such.
FENCED = re.compile(
    r"(<!-- (?:output(?:: [^>]+)?|stage: [\w ]+) -->\n+)?```(\w*)\n(.*?)\n```", re.S
)
QUANTITY = re.compile(r"\d[\d.,]*\s?(?:ms|µs|us|seconds|minutes|[KMG]iB(?:/rank)?)(?![\w-])")
COMPARED = re.compile(
    r"\d[\d.,]*\s?(?:x|×|%|times|percent)\s(?:as\s)?"
    r"(?:faster|slower|fast|slow|less|more|smaller|larger|better|worse|higher|lower)"
)
# Limits and settings, as the code has them.
SAID = {
    "big-models.md": {"16 MiB", "64 KiB"},
    "machines.md": {
        "15 seconds",
        "10 seconds",
        "10 ms",
    },  # of measuring, and of what skew is stated for
    "training.md": {"30 seconds"},  # torchrun's
}


def typed(text):
    """Figures of speed and memory in what nobody prints."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    found = {m[0] for m in QUANTITY.finditer(prose)} | {m[0] for m in COMPARED.finditer(prose)}
    for marked, language, block in FENCED.findall(text):
        if language in ("", "text") and not marked:
            found |= {m[0] for m in QUANTITY.finditer(block)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_is_typed(page):
    assert typed(page.read_text()) - SAID.get(page.name, set()) == set()


def test_typed_figures_are_found():
    assert typed("It takes 12.5 ms, is 1.3 times faster and 5 % slower.") == {
        "12.5 ms", "1.3 times faster", "5 % slower",
    }  # fmt: skip
    assert typed("```text\ndp=2, 12 ms/step, 3 GiB/rank\n```") == {"12 ms", "3 GiB/rank"}
    assert typed("<!-- output -->\n\n```text\n12 ms/step\n```") == set()
    assert typed("`--memory-limit 40GiB` and ```python\nlimit = '3 GiB'\n```") == set()


def test_estimates_are_what_the_result_gives():
    text = (DOCS / "estimates.md").read_text()
    assert text == written(), "run python -m benchmarks.estimates.page > docs/estimates.md"
