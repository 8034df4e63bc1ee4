"""`shardwright explain`: describes a plan file."""

from __future__ import annotations

import click

from shardwright.cli import options
from shardwright.cli.console import print_json, print_plan
from shardwright.plan_io.files import load_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report import plan_json
from shardwright.report.text.axis_table import axis_rows
from shardwright.report.text.explain import explain


@click.command("explain")
@click.argument("plan", type=click.Path(dir_okay=False))
@options.as_json
@paused_to_the_end()
def command(plan: str, as_json: bool) -> None:
    """Show the sharding and the cost of every module in PLAN."""
    loaded = load_plan(plan)
    if not as_json:
        print_plan(loaded)
        return
    print_json(
        {
            **plan_json.parts(loaded),
            "axes": [row.as_json() for row in axis_rows(loaded)],
            "text": explain(loaded),
        }
    )
