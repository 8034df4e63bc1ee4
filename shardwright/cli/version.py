"""The version of the package."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """The installed version; in a source tree that of its pyproject.toml."""
    try:
        return metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        tree = Path(__file__).parents[2]
        file = tree / "pyproject.toml"
        if not file.exists():
            return f"of unknown version, not installed, run in {tree}"
        number = tomllib.loads(file.read_text())["project"]["version"]
        return f"{number}, not installed, run in {tree}"
