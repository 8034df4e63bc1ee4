"""`shardwright export`: writes a plan in the format of another tool."""

from __future__ import annotations

import click

from shardwright.cli import options
from shardwright.cli.console import print_json, say
from shardwright.cli.errors import UsageError
from shardwright.cli.writing import OutputFile, write_text
from shardwright.plan_io.files import load_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report.export import FORMS
from shardwright.report.styles import NotExpressibleError


@click.command("export")
@click.argument("plan", type=click.Path(dir_okay=False))
@click.option(
    "--to", "form", required=True, type=click.Choice(tuple(FORMS)), help="Format to write."
)
@click.option("-o", "--output", type=OutputFile(), help="File instead of stdout.")
@options.as_json
@paused_to_the_end()
def command(plan: str, form: str, output: str | None, as_json: bool) -> None:
    """Write PLAN in a format of torch, Hugging Face or torchtitan.

    Where the format cannot express the plan, the reason is printed and nothing
    is written. `plan --for` offers the nearest plan that it can express.
    """
    loaded = load_plan(plan)
    try:
        text = FORMS[form](loaded)
    except NotExpressibleError as e:
        raise UsageError(
            f"{plan} as {form}: {e}; plan the model with --for {form} to get the nearest plan that"
            " this format can say, with its price"
        ) from e
    if output:
        write_text(output, text)
    if as_json:
        print_json({"plan": plan, "to": form, "file": output, "text": text})
    elif output:
        say(f"wrote {output}")
    else:
        click.echo(text, nl=False)
