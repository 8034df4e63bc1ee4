"""`shardwright plan`: writes the best plan under a memory limit to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from shardwright.cli import groups, options, plan_config
from shardwright.cli.console import columns, print_frontier, print_json, say, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning import capturing, choosing, named_machines, searching
from shardwright.cli.timings import Choice
from shardwright.cli.writing import OutputFile
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.plan_io.files import save_plan
from shardwright.planner.audit.avoidable import Avoidable
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.strategies.preference import Preferred
from shardwright.report import plan_json
from shardwright.report.answer import alternatives, answer_lines, model_text
from shardwright.report.choice import fit, why
from shardwright.report.headline import headline
from shardwright.report.other_plans import OtherPlans, other_plans
from shardwright.report.summary import summary
from shardwright.report.text import notes
from shardwright.train.targets.target_text import Target

_LABEL = 12  # columns of a line's name
_CONFIGS = (".toml", ".yaml", ".yml", ".sh", ".py")  # which a plan file has none of


@click.command("plan")
@groups.target
@groups.machine(timed=True)
@groups.plan_options(
    *(
        "memory_limit",
        "constraints",
        "seconds",
        "processes",
        "method",
        "micro_batches",
        "stages",
        "allow_async",
        "loss_chunks",
        "mlp_chunks",
    )
)
@click.option(
    "--objective",
    type=click.Choice(choosing.OBJECTIVES),
    default="time",
    show_default=True,
    help="The fastest plan that fits, the smallest, or the fastest on the fewest devices.",
)
@click.option(
    "--for",
    "framework",
    type=click.Choice(plan_config.FRAMEWORKS),
    help="Also write a config of this framework that trains as the plan does, or as nearly as it"
    " can.",
)
@click.option("--config", "config_file", type=OutputFile(), help="File of --for, not stdout.")
@options.optimizer
@groups.numerics
@click.option("-o", "--output", type=OutputFile(), help="Plan file to write.")
@click.option(
    "--all", "whole", is_flag=True, help="The whole frontier, the baselines and the reasons."
)
@options.as_json
@paused_to_the_end()
def command(
    target: Target,
    machine: MachineOptions,
    wanted: PlanOptions,
    objective: str,
    optimizer: str | None,
    numerics: Mapping[str, str],
    output: str | None,
    as_json: bool,
    **config: Any,
) -> None:
    """Choose the best plan to train TARGET on a machine."""
    framework, file = config["framework"], config["config_file"]
    if file is not None and framework is None:
        raise UsageError("--config names the file of --for; give both")
    if framework is not None and output is not None and Path(output).suffix in _CONFIGS:
        raise UsageError(
            f"-o {output}: -o writes the plan, as JSON; --config {output} names the file of --for"
        )
    known = named_machines.machine_of(machine)
    limit = limit_on(known, wanted.memory_limit)
    parts = list(named_machines.smaller_machines(known)) if objective == "devices" else [known]
    searching.check(parts, wanted, target.batch)
    captured = capturing.capture(
        target,
        optimizer,
        numerics=numerics,
        machine=known,
        memory_limit=wanted.memory_limit,
        fast_halves=known.device.fast_halves,
    )
    found = choosing.choose(captured, known, objective, wanted, machine.timing_seconds)
    others = other_plans(found.plan, found.frontier, limit)
    if output:
        whole = found.frontier.with_rivals(found.plan, others.simulated)
        save_plan(captured.named(whole), output)
    offered = None
    if framework is not None:
        offered = plan_config.config_for(found.plan, captured, known, framework, limit)
    if as_json:
        shown = content(found, captured, others, output)
        print_json({**shown, "config": plan_config.offer_json(offered, file)})
        return
    searched = searching.searches_pipelines(known, wanted, found.plan)
    print_verdict(found, limit, captured, pipelines=searched)
    if config["whole"]:
        print_reasons(found, limit, objective)
    else:
        print_answer(found, others, limit, choosing.avoidable(captured, known, found))
    if output:
        say(f"wrote {output}; `shardwright explain {output}` shows all of it")
    elif not config["whole"]:
        say("next: -o plan.json keeps the plan, for explain, report, verify and run")
    if offered is not None and framework is not None:
        for line in plan_config.write_offer(offered, framework, file):
            click.echo(line)


def content(
    found: Choice, captured: capturing.CapturedTarget, others: OtherPlans, output: str | None
) -> dict[str, object]:
    """The output of `plan --json`; `plan` is the content of the plan file."""
    frontier = found.frontier
    return {
        "precision": captured.precision,
        "capture_seconds": captured.seconds,
        "search_seconds": frontier.search_seconds,
        "uniform": _uniform(found.preferred),
        **plan_json.whole(
            captured.named(frontier.with_rivals(found.plan, others.simulated)), output
        ),
    }


def _uniform(found: Preferred | None) -> dict[str, object] | None:
    """The best uniform strategy, and the part of its time that the fastest plan saves."""
    if found is None or found.uniform is None:
        return None
    return {
        "strategy": found.uniform.name,
        "step_seconds": found.uniform.step_seconds,
        "peak_bytes": found.uniform.peak_bytes,
        "fastest_seconds": found.fastest.step_seconds,
        "gain": found.gain,
        "chosen": found.plan.name == found.uniform.name,
    }


def print_verdict(
    found: Choice, limit: int | None, captured: capturing.CapturedTarget, *, pipelines: bool
) -> None:
    """Print whether the plan fits, its kinds of parallelism, its precision and the model's size.

    `pipelines` says whether pipelines were searched.
    """
    plan = found.plan
    click.echo(wrapped(fit(plan, limit)))
    if text := str(found.preferred or ""):
        click.echo(wrapped(text))
    text = headline(plan)
    if plan.stages == 1 and plan.devices > 1:
        unsearched = "" if pipelines else " (none was searched; --stages 1,2 does)"
        text += f" · no pipeline{unsearched}"
    click.echo(f"{wrapped(text)}\n{wrapped(captured.precision)}\n")
    text = f"{'model':<{_LABEL}}{model_text(plan, captured.graph)}"
    if captured.unnamed:
        text += f"; the config names no {' and no '.join(captured.unnamed)}: transformers' default"
    click.echo(wrapped(text, _LABEL))


def print_answer(
    found: Choice, others: OtherPlans, limit: int | None, avoidable: Avoidable
) -> None:
    """Print speed, memory, limits, what would help, and other plans that fit; notes in short."""
    plan = found.plan
    for name, text in answer_lines(plan, others.costs, limit, avoidable):
        line = f"{name:<{_LABEL}}{text}"
        click.echo(wrapped(line, _LABEL))
    unlisted = found.frontier.place_of(plan) is None
    listed = len(found.frontier) + len(found.frontier.baselines) - (not unlisted)
    say("\n".join(["", *alternatives(plan, others, listed)]))
    for line in notes.short(plan):
        click.echo(wrapped(line))
    for note in plan.notes:
        if note != str(found.preferred):  # which stands above
            click.echo(wrapped(f"note: {note}"))


def print_reasons(found: Choice, limit: int | None, objective: str) -> None:
    """Print the frontier, why the plan was chosen, and all notes on its operators."""
    plan, frontier = found.plan, found.frontier
    click.echo()
    print_frontier(frontier, plan)
    first, *others = why(plan, frontier, limit, objective)
    text = f"chosen: {summary(plan)}"
    click.echo(f"\n{wrapped(text)}")
    for reason in (f"because it is {first}", *others):
        click.echo(wrapped(reason))
    for line in notes.lines(plan, columns()):
        click.echo(line)
    for note in plan.notes:
        click.echo(wrapped(f"note: {note}"))
