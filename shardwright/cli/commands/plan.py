"""`shardwright plan`: the best plan under a limit, written to a file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

import click

from shardwright.cli import options, planning
from shardwright.cli.console import print_frontier, print_json
from shardwright.cli.writing import OutputFile
from shardwright.ir.frontier import Frontier
from shardwright.ir.memory import as_json as memory_content
from shardwright.ir.plan import Plan
from shardwright.plan_io.files import save_plan
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.planner.memory_limits import limit_on
from shardwright.report.choice import fit, why
from shardwright.report.summary import summary, ways
from shardwright.report.text import notes
from shardwright.report.text.explain import WIDTH


@click.command("plan")
@options.target
@options.machine
@options.set_machine
@options.time_operators
@options.memory_limit
@options.constraints
@options.seconds
@click.option(
    "--objective",
    type=click.Choice(planning.OBJECTIVES),
    default="time",
    show_default=True,
    help="The fastest plan that fits, the smallest, or the fastest on the fewest devices.",
)
@options.method
@options.micro_batches
@options.stages
@options.allow_async
@options.optimizer
@options.habits
@click.option("-o", "--output", type=OutputFile(), help="Plan file to write.")
@options.as_json
@paused_to_the_end()
def command(
    target: str,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    machine: str,
    figures: Mapping[str, object],
    time_operators: float,
    memory_limit: int | str | None,
    constraints: tuple[str, ...],
    seconds: float,
    objective: str,
    method: str,
    micro_batches: tuple[int, ...],
    stages: tuple[int, ...],
    allow_async: bool,
    optimizer: str | None,
    habits: Mapping[str, str],
    output: str | None,
    as_json: bool,
) -> None:
    """Choose the best plan to train TARGET on a machine."""
    known = planning.machine_of(machine, figures=figures)
    limit = limit_on(known, memory_limit)
    timing = time_operators if machine == "here" else 0.0
    wishes = planning.Wishes(
        constraints, seconds, method, micro_batches, stages, allow_async, timing
    )
    fewest = objective == "devices"
    planning.check(list(planning.machine_parts(known)) if fewest else [known], wishes, batch)
    captured = planning.capture(
        target,
        batch,
        seq,
        settings,
        optimizer,
        habits=habits,
        machine=known,
        memory_limit=memory_limit,
    )
    plan, frontier = planning.choose(captured, known, objective, memory_limit, wishes)
    if output:
        save_plan(frontier.with_rivals(plan), output)
    if as_json:
        print_json(content(plan, frontier, captured.seconds, output))
        return
    print_choice(plan, frontier, limit, objective, pipelines=bool(stages))
    if output:
        click.echo(f"wrote {output}; `shardwright explain {output}` shows all of it")


def content(
    plan: Plan, frontier: Frontier, capture_seconds: float, output: str | None
) -> dict[str, object]:
    """What `plan --json` prints; `plan` is what the plan file holds."""
    return {
        "capture_seconds": capture_seconds,
        "search_seconds": frontier.search_seconds,
        "step_seconds": plan.step_seconds,
        "peak_bytes": plan.peak_bytes,
        "memory": memory_content(plan.memory),
        "lower_bound_seconds": plan.lower_bound_seconds,
        "devices": plan.devices,
        "mesh": str(plan.mesh),
        "micro_batches": plan.micro_batches,
        "stages": plan.stages,
        "summary": summary(plan),
        "remarks": notes.as_json(plan),
        "file": output,
        "plan": json.loads(plan_to_json(frontier.with_rivals(plan))),
    }


def print_choice(
    plan: Plan, frontier: Frontier, limit: int | None, objective: str, *, pipelines: bool
) -> None:
    """Whether it fits and in which ways it is parallel, the frontier with the baselines, and why.

    `pipelines` says whether they were searched, too.
    """
    click.echo(textwrap.fill(fit(plan, limit), WIDTH, subsequent_indent="  "))
    text = ways(plan)
    if plan.stages == 1 and plan.devices > 1:
        unsearched = "" if pipelines else " (none was searched; --stages 1,2,4 does)"
        text += f", no pipeline{unsearched}"
    click.echo(f"{textwrap.fill(text, WIDTH, subsequent_indent='  ')}\n")
    print_frontier(frontier, plan)
    first, *others = why(plan, frontier, limit, objective)
    text = f"chosen: {summary(plan)}"
    click.echo(f"\n{textwrap.fill(text, WIDTH, subsequent_indent='  ')}")
    for reason in (f"because it is {first}", *others):
        click.echo(textwrap.fill(reason, WIDTH, subsequent_indent="  "))
    for line in notes.lines(plan, WIDTH):
        click.echo(line)
    for note in plan.notes:
        click.echo(textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="  "))
