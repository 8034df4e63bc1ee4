"""`shardwright diff`: the differences between two plans and of their costs."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from shardwright.cli import options
from shardwright.cli.console import print_json
from shardwright.plan_io.files import load_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report.diff.diff_text import diff_json, diff_tables, diff_text
from shardwright.report.diff.difference import difference


@click.command("diff")
@click.argument("first", type=click.Path(dir_okay=False))
@click.argument("second", type=click.Path(dir_okay=False))
@options.as_json
@paused_to_the_end()
def command(first: str, second: str, as_json: bool) -> None:
    """Show the differences of plan SECOND from FIRST, module by module, and their costs."""
    one, other = load_plan(first), load_plan(second)
    found = difference(one, other)
    if as_json:
        print_json({"first": first, "second": second, **diff_json(found)})
    elif sys.stdout.isatty():
        axes = list(dict.fromkeys([*one.mesh.names, *other.mesh.names]))
        console = Console()
        console.print(diff_tables(found, (first, second), axes, console.width))
    else:
        click.echo(diff_text(found, (first, second)))
