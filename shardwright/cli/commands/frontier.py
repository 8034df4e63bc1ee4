"""`shardwright frontier`: the Pareto frontier of time and memory, also over device counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

import click

from shardwright.cli import groups, options
from shardwright.cli.commands.plan_files.report import PAGES, page_of, write_page
from shardwright.cli.console import print_chart, print_frontier, print_json, say, working, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning import capturing, named_machines, searching
from shardwright.cli.writing import OutputFileOrFolder
from shardwright.ir.frontier import Frontier
from shardwright.ir.options.plan_options import DEFAULTS, PlanOptions
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.plan_io.files import save_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.planner.memory_limits import limit_on
from shardwright.report import plan_json
from shardwright.report.choice import none_fits
from shardwright.report.frontier.chart import Mark
from shardwright.report.page import Shown
from shardwright.train.targets.target_text import Target


@click.command("frontier")
@groups.target
@groups.machine()
@options.device_counts
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
        "points",
    )
)
@options.optimizer
@groups.numerics
@click.option(
    "-o",
    "--output",
    type=OutputFileOrFolder(*PAGES),
    help="Page to write all plans to, as front.html, or a folder for their plan files.",
)
@options.as_json
@paused_to_the_end()
def command(
    target: Target,
    machine: MachineOptions,
    devices: tuple[int, ...],
    wanted: PlanOptions,
    optimizer: str | None,
    numerics: Mapping[str, str],
    output: str | None,
    as_json: bool,
) -> None:
    """Show every plan for TARGET that no other beats in both time and memory.

    What only saves memory is searched although the fastest plans fit. With --memory-limit, plans
    that need more are left out.
    """
    known = named_machines.machine_of(machine)
    parts = [known.with_devices(count) for count in devices or (known.devices,)]
    searching.check(parts, wanted, target.batch)
    captured = capturing.capture(
        target, optimizer, numerics=numerics, fast_halves=known.device.fast_halves
    )
    limit = wanted.memory_limit
    points = wanted.points
    wanted = replace(wanted, whole=True, points=max(DEFAULTS.points, points))
    settled, left_out = searching.frontiers(captured, parts, wanted, points)
    ended = any(frontier.ended_early for _, frontier in settled)
    found = [(part, _within(frontier, limit)) for part, frontier in settled]
    frontiers = [frontier for _, frontier in found]
    if output:
        _write(output, target.text, found, limit)
    if as_json:
        print_json(
            {
                "file": output,
                "precision": captured.precision,
                "capture_seconds": captured.seconds,
                "search_seconds": sum(f.search_seconds for f in frontiers),
                "ended_by_time_limit": ended,
                "points": [_point(plan, part, limit) for part, f in found for plan in f],
                "baselines": [
                    _point(plan, part, limit) for part, f in found for plan in f.baselines
                ],
                "none_fits": {
                    str(p.devices): words for p, f in found if (words := none_fits(f, limit))
                },
                "constraints": list(map(str, wanted.constraints)),
                "left_out": {str(devices): reason for devices, reason in left_out.items()},
            }
        )
        return
    click.echo(wrapped(captured.precision))
    for (part, frontier), (_, whole) in zip(found, settled, strict=True):
        if words := none_fits(frontier, limit):
            click.echo(wrapped(words))
        click.echo(f"{target.text} on {part}")
        print_frontier(frontier)
        if more := len(whole) - len(frontier):
            say(f"{more} faster plan{'s' * (more > 1)} of more memory than the limit left out")
        click.echo()
    for count, reason in left_out.items():
        say(f"no plan on {count} device{'s' * (count > 1)}: {reason}")
    if ended:
        say("the time limit has ended the search; a longer one may find more plans")
    print_chart(_marks(frontiers))
    click.echo(wrapped(_legend(frontiers), 0))
    if output:
        say(f"wrote {output}")


def _within(frontier: Frontier, limit: int | str | None) -> Frontier:
    """The frontier without plans of more memory than a `limit` that is given, if any fits."""
    most = None if limit is None else frontier.limit(limit)
    plans = tuple(plan for plan in frontier if most is None or plan.peak_bytes <= most)
    return replace(frontier, plans=plans) if 0 < len(plans) < len(frontier) else frontier


def _write(
    output: str,
    target: str,
    found: Sequence[tuple[Machine, Frontier]],
    limit: int | str | None,
) -> None:
    """Write all plans as a page, or as files of a folder, named by devices and index."""
    with working("writing plans"):
        shown = [
            Shown(f"{part.devices}-{label}", plan)
            for part, frontier in found
            for label, plan in _labelled(frontier)
        ]
        if output.endswith(PAGES):
            memory = limit_on(found[0][0], limit)
            fits = [
                i
                for i, item in enumerate(shown)
                if memory is None or item.plan.peak_bytes <= memory
            ]
            best = min(fits, key=lambda i: shown[i].plan.step_seconds, default=0)
            write_page(output, page_of(shown, target, memory, chosen=best))
            return
        folder = Path(output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot make the folder {output}: {e.strerror}") from e
        for item in shown:
            save_plan(item.plan, folder / f"{item.label}.json")


def _labelled(frontier: Frontier) -> Iterator[tuple[str, Plan]]:
    """The plans by their index in the table, and the baselines outside of the frontier by name."""
    for index, plan in enumerate(frontier):
        yield f"{index:03}", plan
    names = {plan.name for plan in frontier}
    for plan in frontier.baselines:
        if plan.name not in names:
            yield plan.name.replace(" ", "-"), plan


def _point(plan: Plan, machine: Machine, limit: int | str | None) -> dict[str, object]:
    return {"name": plan.name, **plan_json.row(plan, limit_on(machine, limit))}


def _marks(frontiers: list[Frontier]) -> list[Mark]:
    """Plans as `o` beside the baselines' letters; with several device counts, a symbol for each."""
    marks = []
    for place, found in enumerate(frontiers):
        if len(frontiers) == 1:
            letters = zip(ascii_lowercase, found.baselines, strict=False)
            marks += [Mark(p.step_seconds, p.peak_bytes, letter) for letter, p in letters]
        symbol = "o" if len(frontiers) == 1 else _symbol(found, place)
        marks += [Mark(plan.step_seconds, plan.peak_bytes, symbol) for plan in found]
    return marks


def _symbol(frontier: Frontier, place: int) -> str:
    """The number of devices where it has one digit, else a letter for the index in the list."""
    devices = frontier[0].devices
    return str(devices) if devices < 10 else ascii_uppercase[place % 26]


def _legend(frontiers: list[Frontier]) -> str:
    if len(frontiers) > 1:
        names = [f"{_symbol(f, i)}: {f[0].devices} devices" for i, f in enumerate(frontiers)]
        return "step time over memory per rank; " + ", ".join(names)
    letters = zip(ascii_lowercase, frontiers[0].baselines, strict=False)
    return "step time over memory per rank; " + ", ".join(
        ["o: plan on the frontier", *(f"{letter}: {plan.name}" for letter, plan in letters)]
    )
