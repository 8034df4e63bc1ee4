"""The command line: parse, call one function, print. Only commands that need torch import it."""

from __future__ import annotations

import click

from shardwright.cli.commands import (
    audit,
    doctor,
    explore,
    frontier,
    plan,
    price,
    profile,
    report_measurement,
    run,
    strategies,
    verify,
)
from shardwright.cli.commands.plan_files import (
    diff,
    explain,
    export,
    program,
    recost,
    report,
    simulate,
)
from shardwright.cli.errors import OneLineErrors
from shardwright.cli.version import version

# Fits a command's first sentence on one line.
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _show_version(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    """Callback of `--version`: print it and exit."""
    if asked and not ctx.resilient_parsing:
        click.echo(f"shardwright {version()}")
        ctx.exit()


@click.group(cls=OneLineErrors, context_settings=SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Find, explain and run the best ways to train a PyTorch model in parallel.

    TARGET is file.py:function, where the function returns a shardwright.Job, or
    a Hugging Face config.json, or a folder with one, together with --batch and,
    for language models, --seq. MACHINE is a preset such as 8xH100, 2x8xA100 or
    2xcpu, a TOML file, or `here`.
    """


for command in (
    plan,
    price,
    frontier,
    explore,
    strategies,
    explain,
    diff,
    report,
    simulate,
    program,
    export,
    audit,
    verify,
    recost,
    run,
    profile,
    report_measurement,
    doctor,
):
    main.add_command(command.command)
