"""Work trees of earlier commits, for comparisons with them."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import record


@contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """A work tree of `commit` of this repository, while it lasts."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit],
            cwd=record.ROOT,
            check=True,
        )
        try:
            yield tree
        finally:
            remove = ["git", "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, cwd=record.ROOT, check=True)
