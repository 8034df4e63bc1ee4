"""Files of a git directory at a commit, and tables of Markdown in them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NUMBER = re.compile(r"-?[\d,]*\.?\d+")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A git directory without a work tree; `commit` is the one to read from."""

    git: Path
    commit: str

    @classmethod
    def of(cls, git: Path, commit: str = "HEAD") -> Snapshot:
        """The snapshot at a commit, by its full hash."""
        return cls(git, _git(git, "rev-parse", commit).strip())

    def at(self, commit: str) -> Snapshot:
        """The same repository at another commit."""
        return Snapshot.of(self.git, commit)

    def read(self, path: str) -> str:
        """The text of a file."""
        return _git(self.git, "show", f"{self.commit}:{path}")

    def files(self, folder: str) -> list[str]:
        """The paths of all files under a folder, sorted."""
        return _git(self.git, "ls-tree", "-r", "--name-only", self.commit, folder).splitlines()


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a table: `cells` by the names of the columns, `number` of the line in its file."""

    number: int
    heading: str
    cells: dict[str, str]


def tables(text: str) -> Iterator[Line]:
    """The rows of all Markdown tables; `heading` is the last line with text before the table."""
    heading = ""
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped.startswith("|"):
            columns = []
            heading = stripped or heading
            continue
        cells = [cell.strip() for cell in stripped.strip("|").split("|")]
        if not columns:
            columns = cells
        elif not all(set(cell) <= set("-: ") for cell in cells):
            yield Line(number, heading, dict(zip(columns, cells, strict=False)))


def number(text: str) -> float:
    """The first number of a cell; thousands may have commas.

    >>> number("~5,762.5 ms")
    5762.5
    """
    found = _NUMBER.search(text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return float(found[0].replace(",", ""))


def _git(git: Path, *command: str) -> str:
    result = subprocess.run(
        ["git", "-C", str(git), *command], check=True, capture_output=True, text=True
    )
    return result.stdout
