"""`shardwright program`: prints, compares and checks the step programs of a plan's ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click

from shardwright.cli import groups, options
from shardwright.cli.console import print_json, working, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import PlanOfTarget
from shardwright.cli.planning import capturing, checked_plan
from shardwright.ir.graph import VerifyError
from shardwright.ir.plan import Plan
from shardwright.plan_io.files import load_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.program.step.lower.rank_steps import check_rank, passes_named
from shardwright.program.step.optimize import Pass
from shardwright.program.step.order import check_order
from shardwright.program.step.program_json import program_content
from shardwright.program.step.step_program import StepProgram
from shardwright.report.program_text import program_diff, program_summary, program_text

NOT_IN_ORDER = 1  # exit status of programs that do not fit together


class Checked(NamedTuple):
    """The result of checking all ranks' programs: an empty `error` if they fit together."""

    ranks: int
    collectives: int
    error: str


@click.command("program")
@groups.target_and_plan
@click.option("--rank", default=0, show_default=True, help="The rank whose program is printed.")
@click.option(
    "--diff",
    "second",
    type=click.Path(dir_okay=False),
    help="Another plan of TARGET: print what its program has otherwise, as a unified diff.",
)
@click.option(
    "--passes",
    default="all",
    show_default=True,
    metavar="all|naive|NAME,...",
    help="The program as it runs, as it is lowered (naive), or after the passes named.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check the programs of all ranks: collectives of each group in kind, order, sizes, dtype.",
)
@click.option("--full", is_flag=True, help="Print repeated layers and micro-batches every time.")
@options.as_json
@paused_to_the_end()
def command(
    given: PlanOfTarget,
    rank: int,
    second: str | None,
    passes: str,
    check: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Print the step program of a rank: what it runs in one step of PLAN, in order.

    A plan file holds decisions and not the graph, so that TARGET is captured again.
    """
    if full and second is not None:
        raise UsageError("--full is about the text of one program, and --diff is complete anyway")
    chosen = passes_named(passes)
    for file in (given.plan, second):
        if file is not None:
            plan = load_plan(file)
            check_rank(plan.pipeline, plan.layout_mesh, rank)
    captured, plan = checked_plan.planned(given)
    other = None if second is None else checked_plan.plan_in_file(second, captured, None)
    with working(f"lowering {given.plan}"):
        lower = _lowering(captured, chosen)
        program = lower(plan, rank)
        changed = None if other is None else lower(other, rank)
        checked = _checked(lower, plan) if check else None
    names = given.plan, second or ""
    diff = None if changed is None else program_diff(program, changed, names)
    if as_json:
        print_json(
            {
                "plan": given.plan,
                "rank": rank,
                "program": program_content(program),
                "diff": diff,
                "checked": None if checked is None else checked._asdict(),
            }
        )
    else:
        if checked is None or diff is not None:
            _print(program, diff, full)
        if checked is not None:
            click.echo(_in_words(checked, plan))
    sys.exit(NOT_IN_ORDER if checked is not None and checked.error else 0)


def _lowering(
    captured: capturing.CapturedTarget, passes: Sequence[Pass]
) -> Callable[[Plan, int], StepProgram]:
    """The function that lowers a plan of the captured graph for a rank."""
    from shardwright.program.plan_decoder import read_plan
    from shardwright.program.step.lower.rank_steps import step_program
    from shardwright.rules.analysis import analyze

    graph = captured.graph
    analysis = analyze(graph)
    return lambda plan, rank: step_program(
        graph, analysis, read_plan(plan, graph, analysis), rank, passes
    )


def _checked(lower: Callable[[Plan, int], StepProgram], plan: Plan) -> Checked:
    programs = [lower(plan, rank) for rank in range(plan.devices)]
    collectives = sum(len(list(program.transfers())) for program in programs)
    try:
        check_order(programs)
    except VerifyError as e:
        return Checked(len(programs), collectives, str(e))
    return Checked(len(programs), collectives, "")


def _print(program: StepProgram, diff: str | None, full: bool) -> None:
    if diff is None:
        click.echo(program_text(program, full=full))
        click.echo(f"\n{program_summary(program)}")
    else:
        click.echo(diff or "both programs are equal")


def _in_words(checked: Checked, plan: Plan) -> str:
    if checked.error:
        return f"the programs of the {checked.ranks} ranks do not fit together: {checked.error}"
    words = (
        f"checked the programs of {checked.ranks} ranks on {plan.mesh}: their {checked.collectives}"
        " collectives match along each axis, group by group, in kind, order, sizes and dtype; no"
        " rank waits forever"
    )
    return wrapped(words, 0)
