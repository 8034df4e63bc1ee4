"""`shardwright recost`: checks and prices a plan that was edited by hand."""

from __future__ import annotations

from dataclasses import replace

import click

from shardwright.cli import groups, options
from shardwright.cli.console import print_json, say, working
from shardwright.cli.groups import MachineOptions, PlanOfTarget
from shardwright.cli.planning import checked_plan, named_machines, searching
from shardwright.cli.writing import OutputFile
from shardwright.ir.plan import Plan
from shardwright.plan_io.files import save_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report import plan_json
from shardwright.report.diff.diff_text import diff_text
from shardwright.report.diff.difference import difference
from shardwright.report.summary import summary


@click.command("recost")
@groups.target_and_plan
@groups.machine()
@options.optimizer
@click.option("-o", "--output", type=OutputFile(), help="Plan file to write.")
@options.as_json
@paused_to_the_end()
def command(
    given: PlanOfTarget,
    machine: MachineOptions,
    optimizer: str | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Check and price PLAN, which was edited by hand, also for another machine.

    The decisions in the file are read: mesh, tilings, layouts of parameters and
    whether they are regathered, recomputed segments, micro-batches, stages and
    their schedule. All other fields (layouts of values, seconds, bytes,
    collectives) are computed again.
    """
    known = named_machines.machine_of(machine)
    captured, before = checked_plan.planned(given)
    frontier = searching.search(captured, known)
    with working(f"costing {given.plan}"):
        from shardwright.planner.recost import recosted

        chosen = captured.optimizer if optimizer is None else optimizer
        after = frontier.with_rivals(recosted(before, captured.graph, known, chosen, frontier))
    after = replace(after, chosen_precision=before.chosen_precision)
    if output:
        save_plan(after, output)
    if as_json:
        print_json(plan_json.whole(after, output))
        return
    click.echo(f"costed: {summary(after)}")
    click.echo(_beside(after, frontier[0]))
    click.echo(diff_text(difference(before, after), (given.plan, output or "costed again")))
    if output:
        say(f"wrote {output}")


def _beside(plan: Plan, fastest: Plan) -> str:
    ratio = plan.step_seconds / fastest.step_seconds
    return f"the fastest plan that is found takes {fastest.step_seconds * 1e3:.2f} ms: {ratio:.2f}x"
