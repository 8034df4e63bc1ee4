"""docs/benchmarks.md and marked parts of other pages, of the committed results and nothing else.

    python -m benchmarks.page

A benchmark whose folder has a `page.py` with `TITLE` and `body(result)` and a `result.json` is on
the page; so is each PART of a folder that has a `PART_page.py` and a `PART.json`. What stands
between `<!-- benchmarks/NAME -->` and `<!-- end -->` on any page of docs is `details(result)` of
that benchmark. A test compares the pages with what this writes.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"
PAGE = DOCS / "benchmarks.md"
_HEAD = """# Benchmarks

Every figure here is written by `python -m benchmarks.page` from a file that a command of
`benchmarks` has left; each says which.
"""
_MARKED = re.compile(r"(<!-- benchmarks/(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """All pages that show results, in Markdown."""
    known = {path: path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    marked = {path: filled(text) for path, text in known.items() if _MARKED.search(text)}
    return {PAGE: written(), **marked}


def filled(text: str) -> str:
    """A page whose marked parts are made of results."""
    return _MARKED.sub(lambda found: f"{found[1]}{_details(found[2])}\n{found[3]}", text)


def _details(name: str) -> str:
    file = _file(name)
    if not file.exists():
        return "\nThere is no record yet.\n"
    result: dict[str, Any] = json.loads(file.read_text())
    return f"\n{_module(name).details(result).strip()}\n\n{_origin(name, result)}\n"


def written() -> str:
    """docs/benchmarks.md."""
    return "\n".join([_HEAD.rstrip("\n"), *(_section(name) for name in _found())]) + "\n"


def _found() -> list[str]:
    """Folders, or FOLDER/PART, with something to show and a result, by title."""
    every = [f.parent.name for f in FOLDER.glob("*/page.py")]
    every += [f"{f.parent.name}/{f.stem.removesuffix('_page')}" for f in FOLDER.glob("*/*_page.py")]
    names = [name for name in every if _file(name).exists()]
    with_title = [(_module(name).TITLE, name) for name in names if hasattr(_module(name), "TITLE")]
    return [name for _, name in sorted(with_title)]


def _section(name: str) -> str:
    result: dict[str, Any] = json.loads(_file(name).read_text())
    module = _module(name)
    return f"\n## {module.TITLE}\n\n{module.body(result).strip()}\n\n{_origin(name, result)}"


def _origin(name: str, result: dict[str, Any]) -> str:
    host = result["machine"]
    return (
        f"`{result['command']}`, {result['date']}, on {host['cores']} cores of {host['processor']},"
        f" torch {result['versions']['torch']}, at commit {result['commit'][:7]}:"
        f" `benchmarks/{_file(name).relative_to(FOLDER)}`."
    )


def _module(name: str) -> Any:
    folder, _, part = name.partition("/")
    return importlib.import_module(f"benchmarks.{folder}.{f'{part}_page' if part else 'page'}")


def _file(name: str) -> Path:
    folder, _, part = name.partition("/")
    return FOLDER / folder / f"{part or 'result'}.json"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
