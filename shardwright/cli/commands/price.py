"""`shardwright price`: the plan and the cost of one uniform strategy."""

from __future__ import annotations

from collections.abc import Mapping

import click

from shardwright.cli import groups, options
from shardwright.cli.console import columns, print_json, say, working, wrapped
from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning import capturing, named_machines
from shardwright.cli.writing import OutputFile
from shardwright.ir.options.mixed_precision import HALF_DTYPES, MASTER
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.plan_io.files import save_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.strategies.unpriced import mixed_precision
from shardwright.report import plan_json
from shardwright.report.choice import fit
from shardwright.report.summary import summary
from shardwright.report.text import notes
from shardwright.train.targets.target_text import Target


@click.command("price")
@groups.target
@groups.machine()
@click.option(
    "--strategy",
    "text",
    required=True,
    help='Degrees, storage, schedule and recomputation, as "dp_shard=8 tp=8 mb=4 ac=full".',
)
@groups.plan_options("memory_limit")
@options.optimizer
@groups.numerics
@click.option("-o", "--output", type=OutputFile(), help="Plan file to write.")
@options.as_json
@paused_to_the_end()
def command(
    target: Target,
    machine: MachineOptions,
    text: str,
    wanted: PlanOptions,
    optimizer: str | None,
    numerics: Mapping[str, str],
    output: str | None,
    as_json: bool,
) -> None:
    """Price one uniform strategy to train TARGET, such as "dp_shard=8 tp=8"."""
    known, strategy = named_machines.machine_of(machine), Strategy.parse(text)
    limit = limit_on(known, wanted.memory_limit)
    strategy.require_devices(known.devices)
    captured = capturing.capture(
        target,
        optimizer,
        numerics=_numerics(strategy, numerics),
        fast_halves=known.device.fast_halves,
    )
    with working(f"pricing {strategy} on {known}"):
        from shardwright.planner.strategies import pricing

        tracer = captured.tracer(known)
        plan = pricing.price(captured.graph, known, strategy, captured.optimizer, tracer)
    plan = captured.named(plan)
    if output:
        save_plan(plan, output)
    if as_json:
        print_json(
            {
                "precision": captured.precision,
                "capture_seconds": captured.seconds,
                "strategy": plan.name,
                "fits": limit is None or plan.peak_bytes <= limit,
                **plan_json.whole(plan, output),
            }
        )
        return
    lines = (fit(plan, limit), f"strategy: {plan.name}", summary(plan), captured.precision)
    for line in lines:
        click.echo(wrapped(line))
    for line in notes.lines(plan, columns()):
        click.echo(line)
    for note in plan.notes:
        click.echo(wrapped(f"note: {note}"))
    if output:
        say(f"wrote {output}; `shardwright explain {output}` shows all of it")


def _numerics(strategy: Strategy, given: Mapping[str, str]) -> Mapping[str, str]:
    """The numerics of the capture: those of the strategy's dtypes, unless others are `given`."""
    if strategy.param_dtype is None:
        return given
    mixed = strategy.param_dtype in (*HALF_DTYPES, "tf32") and strategy.state_dtype == MASTER
    return {**(mixed_precision(strategy) if mixed else {"precision": "model"}), **given}
