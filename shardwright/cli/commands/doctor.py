"""`shardwright doctor`: checks this host and advises on missing parts, or explains a machine."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from shardwright.cli import options
from shardwright.cli.console import fitted, print_json, say, working
from shardwright.cli.groups import MachineOptions
from shardwright.cli.planning import named_machines
from shardwright.machine.model import Machine
from shardwright.machine.provenance import origins
from shardwright.report.accuracy import times_text

_STYLES = {"ok": "green", "missing": "yellow", "failed": "bold red"}
FAILED = 1  # exit status when a required check fails


@click.command("doctor")
@click.option(
    "--ranks",
    type=options.ranks(0),
    help="Processes that try a collective; 0 skips it. By default the GPUs, at least 2.",
)
@click.option(
    "--machine",
    "named",
    metavar="MACHINE",
    help="A preset or a machine file: list the origin of its figures, and check nothing.",
)
@options.as_json
def command(ranks: int | None, named: str | None, as_json: bool) -> None:
    """Check versions, devices, links and ranks of this host.

    Exit status 1 means that training cannot work on this host. With --machine, list what the
    figures of a machine rest on.
    """
    if named is not None:
        if ranks is not None:
            raise click.UsageError("--machine checks no ranks; leave --ranks out")
        _explain(named_machines.machine_of(MachineOptions(named, {})), as_json=as_json)
        return
    with working("looking around"):
        from shardwright.profile.doctor_checks import CheckState, run_checks

        findings = list(run_checks(ranks))
    failed = [finding for finding in findings if finding.state is CheckState.FAILED]
    if as_json:
        checks = [
            {"name": f.name, "state": f.state.value, "text": f.text, "remedy": f.remedy}
            for f in findings
        ]
        print_json({"ok": not failed, "checks": checks})
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            state = finding.state.value
            line = Text(fitted(f"{state:<8}{finding.name:<14}{finding.text}"))
            line.stylize(_STYLES[state], 0, len(state))
            console.print(line)
            if finding.remedy:
                console.print(Text(fitted(f"{'':<22}{finding.remedy}"), "dim"))
        text = (
            f"{len(failed)} of {len(findings)} checks failed"
            if failed
            else "ready to plan and train"
        )
        console.print(Text(text, "bold"))
    sys.exit(FAILED if failed else 0)


def _explain(machine: Machine, *, as_json: bool) -> None:
    """Print the origin of every figure, and how predictions on this device compare with others'."""
    found, times = origins(machine), times_text(machine.name)
    if as_json:
        figures = [
            {"figure": o.figure, "value": o.value, "kind": o.kind.value, "source": o.source}
            for o in found
        ]
        print_json({"machine": machine.name, "figures": figures, "times": "; ".join(times)})
        return
    for origin in found:
        say(f"{origin.figure:<24} {origin.value:<30} {origin.kind.value}: {origin.source}")
    for sentence in times:
        say(sentence)
