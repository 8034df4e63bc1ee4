"""`shardwright doctor`: checks this host and advises on missing parts."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.text import Text

from shardwright.cli import options
from shardwright.cli.console import print_json, working

_STYLES = {"ok": "green", "missing": "yellow", "failed": "bold red"}
FAILED = 1  # exit status when a required check fails


@click.command("doctor")
@click.option(
    "--ranks",
    type=options.ranks(0),
    help="Processes that try a collective; 0 skips it. By default the GPUs, at least 2.",
)
@options.as_json
def command(ranks: int | None, as_json: bool) -> None:
    """Check versions, devices, links and ranks of this host.

    Exit status 1 means that training cannot work on this host.
    """
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
            console.print(
                Text.assemble((f"{state:<8}", _STYLES[state]), f"{finding.name:<14}"), end=""
            )
            console.print(Text(finding.text))
            if finding.remedy:
                console.print(Text(f"{'':<22}{finding.remedy}", "dim"))
        text = (
            f"{len(failed)} of {len(findings)} checks failed"
            if failed
            else "ready to plan and train"
        )
        console.print(Text(text, "bold"))
    sys.exit(FAILED if failed else 0)
