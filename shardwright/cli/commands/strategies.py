"""`shardwright strategies`: the best uniform strategies of a model on a machine."""

from __future__ import annotations

from collections.abc import Mapping

import click

from shardwright.cli import groups, options
from shardwright.cli.console import print_frontier, print_json, say, working, wrapped
from shardwright.cli.groups import EnumerationOptions, MachineOptions
from shardwright.cli.planning import capturing, named_machines
from shardwright.cli.writing import OutputFile
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Plan
from shardwright.plan_io.files import save_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.planner.memory_limits import limit_on
from shardwright.report import plan_json
from shardwright.report.choice import fit
from shardwright.train.targets.target_text import Target


@click.command("strategies")
@groups.target
@groups.machine()
@groups.plan_options("memory_limit")
@groups.enumeration
@options.optimizer
@groups.numerics
@click.option("-o", "--output", type=OutputFile(), help="Plan file to write the best to.")
@options.as_json
@paused_to_the_end()
def command(
    target: Target,
    machine: MachineOptions,
    wanted: PlanOptions,
    enumerated: EnumerationOptions,
    optimizer: str | None,
    numerics: Mapping[str, str],
    output: str | None,
    as_json: bool,
) -> None:
    """Show the uniform strategies for TARGET that no other beats in both time and memory."""
    known = named_machines.machine_of(machine)
    limit = limit_on(known, wanted.memory_limit)
    captured = capturing.capture(
        target, optimizer, numerics=numerics, fast_halves=known.device.fast_halves
    )
    with working(f"pricing strategies on {known}") as progress:
        from shardwright.planner.strategies.frontier.priced_frontier import strategies

        frontier = strategies(
            captured.graph,
            known,
            captured.optimizer,
            captured.tracer(known),
            tp_across_hosts=enumerated.tp_across_hosts,
            fp8=enumerated.fp8,
            progress=progress,
        )
    best = _best(frontier, wanted)
    if output:
        save_plan(captured.named(frontier.with_rivals(best)), output)
    if as_json:
        print_json(
            {
                "file": output,
                "precision": captured.precision,
                "capture_seconds": captured.seconds,
                "search_seconds": frontier.search_seconds,
                "best": _point(best, limit),
                "points": [_point(plan, limit) for plan in frontier],
            }
        )
        return
    click.echo(wrapped(fit(best, limit)))
    say(f"best: {best.name}")
    click.echo(f"{wrapped(captured.precision)}\n")
    print_frontier(frontier, best)
    click.echo(f"\n{wrapped(_list(frontier), 0)}")
    if output:
        say(f"wrote {output}; `shardwright explain {output}` shows all of it")


def _best(frontier: Frontier, wanted: PlanOptions) -> Plan:
    """The fastest that fits, or the smallest where none does."""
    try:
        return frontier.fastest(wanted.memory_limit)
    except InfeasibleError:
        return frontier.settled(frontier[-1])


def _list(frontier: Frontier) -> str:
    """The strategies by their index in the table."""
    names = (f"{index}: {plan.name}" for index, plan in enumerate(frontier))
    return f"strategies: {'; '.join(names)}"


def _point(plan: Plan, limit: int | None) -> dict[str, object]:
    return {"strategy": plan.name, **plan_json.row(plan, limit)}
