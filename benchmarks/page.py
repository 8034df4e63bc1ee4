"""docs/benchmarks.md, of the committed results and nothing else.

    python -m benchmarks.page

A benchmark whose folder has a `page.py` with `TITLE` and `body(result)` and a `result.json` is on
the page; a test compares the page with what this writes.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
_HEAD = """# Benchmarks

Every figure here is written by `python -m benchmarks.page` from a file that a command of
`benchmarks` has left; each says which.
"""


def written() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD.rstrip("\n"), *(_section(name) for name in _found())]) + "\n"


def _found() -> list[str]:
    """Folders with something to show and a result, by title."""
    names = [f.parent.name for f in FOLDER.glob("*/page.py") if f.with_name("result.json").exists()]
    with_title = [(_module(name).TITLE, name) for name in names if hasattr(_module(name), "TITLE")]
    return [name for _, name in sorted(with_title)]


def _section(name: str) -> str:
    result: dict[str, Any] = json.loads((FOLDER / name / "result.json").read_text())
    host, module = result["machine"], _module(name)
    origin = (
        f"`{result['command']}`, {result['date']}, on {host['cores']} cores of {host['processor']},"
        f" torch {result['versions']['torch']}, at commit {result['commit'][:7]}:"
        f" `benchmarks/{name}/result.json`."
    )
    return f"\n## {module.TITLE}\n\n{module.body(result).strip()}\n\n{origin}"


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}.page")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(written())
