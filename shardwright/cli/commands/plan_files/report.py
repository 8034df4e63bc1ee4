"""`shardwright report`: renders plan files as one HTML page."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from shardwright.cli import options
from shardwright.cli.console import print_json, say
from shardwright.cli.errors import UsageError
from shardwright.cli.runs.run_output import read_run
from shardwright.cli.tracing import simulated_step, trace_text
from shardwright.cli.writing import OutputFile, write_text
from shardwright.ir.plan import Plan, PlanError
from shardwright.machine.files.figures import machine_named
from shardwright.machine.model import MachineError
from shardwright.plan_io.files import load_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report.page import MeasuredRun, Shown, StepBars, page
from shardwright.report.timelines.chrome import read_trace, simulated

PAGES = (".html", ".htm")  # suffixes of HTML files
_TIMELINES = 8  # plans whose timelines are drawn; each adds some hundred kilobytes


@click.command("report")
@click.argument("plans", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("-o", "--output", required=True, type=OutputFile(), help="HTML file.")
@click.option(
    "--memory-limit",
    callback=options.memory,
    metavar="SIZE",
    help="Memory limit to draw, such as 40GiB; by default the memory of a device of the preset.",
)
@click.option(
    "--measured",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Output of `run --json`: step time and peak memory, shown beside the prediction.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    help="Chrome trace of a measured step, shown below the simulated one.",
)
@click.option("--title", help="Heading of the page.")
@options.as_json
@paused_to_the_end()
def command(
    plans: tuple[str, ...],
    output: str,
    memory_limit: int | None,
    measured: tuple[str, ...],
    trace: str | None,
    title: str | None,
    as_json: bool,
) -> None:
    """Write PLANS as one page: their trade-off, and each plan, module by module.

    The page needs no network: it contains all its data and scripts.
    """
    shown = [Shown(Path(file).stem, load_plan(file)) for file in plans]
    title = title or f"{'Plans' if len(shown) > 1 else 'A plan'} for {shown[0].plan.machine}"
    size = write_page(output, page_of(shown, title, memory_limit, measured, trace))
    if as_json:
        print_json({"file": output, "plans": len(shown), "bytes": size})
    else:
        count = f"{len(shown)} plan{'s' * (len(shown) > 1)}"
        say(f"wrote {output}, {count}; open it in a browser")


def write_page(output: str, text: str) -> int:
    """Write a page and return its length in bytes."""
    write_text(output, text)
    return len(text.encode())


def page_of(
    shown: Sequence[Shown],
    title: str,
    memory_limit: int | None = None,
    measured: Sequence[str] = (),
    trace: str | None = None,
    chosen: int = 0,
) -> str:
    """The page of these plans, with their timelines where they are few.

    The limit is in bytes, by default the memory of a device of the preset; `measured` and `trace`
    are files. Raises `UsageError` without the libraries of reports.
    """
    if memory_limit is None:
        memory_limit = _memory_of(shown[0].plan.machine)
    try:
        runs = [_measured(file) for file in measured]
        timeline = _timeline(trace) if trace is not None else None
        if len(shown) <= _TIMELINES:
            shown = [replace(item, step=_step(item.plan)) for item in shown]
        return page(shown, title, memory_limit, runs, timeline, chosen)
    except ImportError as e:
        raise UsageError(
            f"a report needs {e.name}, which is not installed: pip install 'shardwright[report]'"
        ) from e


def _step(plan: Plan) -> StepBars | None:
    """The bars of the plan's simulated step; None for a plan that has none."""
    try:
        return simulated(simulated_step(plan))
    except (UsageError, PlanError):
        return None


def _memory_of(machine: str) -> int | None:
    """Memory of a device of this preset, also with changed figures; None for other machines."""
    with contextlib.suppress(MachineError):
        return machine_named(machine).device.usable_bytes
    return None


def _timeline(file: str) -> StepBars:
    return read_trace(trace_text(file), Path(file).name)


def _measured(file: str) -> MeasuredRun:
    run = read_run(file)
    return MeasuredRun(
        Path(file).stem,
        run.predicted_seconds,
        run.measured_seconds,
        run.predicted_bytes,
        run.measured_bytes,
    )
