"""The command line: parse, call one function, print. torch is imported only by what needs it."""

from __future__ import annotations

import click

from shardwright.cli import version
from shardwright.cli.commands import (
    diff,
    doctor,
    explain,
    export,
    frontier,
    plan,
    price,
    profile,
    recost,
    report,
    run,
    simulate,
    strategies,
    verify,
)
from shardwright.cli.errors import OneLineErrors

# Fits a command's first sentence on one line.
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=OneLineErrors, context_settings=SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=version.show,
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
    strategies,
    explain,
    diff,
    report,
    simulate,
    export,
    verify,
    recost,
    run,
    profile,
    doctor,
):
    main.add_command(command.command)
