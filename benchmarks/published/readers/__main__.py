"""Write the rows of one source: `python -m benchmarks.published.readers SOURCE GIT_DIRECTORY`."""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

from benchmarks.published.readers.snapshot import Snapshot
from benchmarks.published.row import FOLDER, problems, sources, write_file


def main(source: str, git: Path) -> None:
    """Read, check and write; exit with the problems if there are any."""
    if source not in sources():
        sys.exit(f"source {source!r} is not one of {', '.join(sources())}")
    reader = import_module(f"benchmarks.published.readers.{source.replace('-', '_')}")
    rows = list(reader.rows(Snapshot.of(git)))
    found = [f"{row.key}: {problem}" for row in rows for problem in problems(row)]
    if found:
        sys.exit("\n".join(found))
    write_file(rows, FOLDER / f"{source}.csv")
    print(f"{len(rows)} rows of {source}")
    for reason, count in Counter(row.excluded for row in rows if row.excluded).items():
        print(f"  {count} excluded: {reason}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
