"""`shardwright --version`, also in a source tree that is not installed."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import click


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


def show(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Callback of `--version`: print it and exit."""
    if asked and not ctx.resilient_parsing:
        click.echo(f"shardwright {version()}")
        ctx.exit()
