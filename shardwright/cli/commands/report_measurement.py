"""`shardwright report-measurement`: one row of CSV from what a run predicted and measured."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from pathlib import Path

import click

from shardwright.cli import options
from shardwright.cli.console import print_json, say
from shardwright.cli.errors import UsageError
from shardwright.cli.runs.run_output import RunOutput, read_run
from shardwright.cli.writing import OutputFile, write_text
from shardwright.ir.atomic_io import FileSizeError, read_text_up_to

SETUP = (  # of a row, as `run --json` names them
    *("plan", "strategy", "machine", "devices", "mesh", "inputs", "optimizer", "numerics"),
    *("micro_batches", "compiled", "graph", "shardwright", "torch"),
)
COLUMNS = (
    *("date", "model", *SETUP),
    *("predicted_step_seconds", "measured_step_seconds", "fastest_step_seconds"),
    *("slowest_step_seconds", "steps", "predicted_peak_bytes", "measured_peak_bytes", "note"),
)
_LARGEST = 2**28  # bytes of a file of rows
_WARM_UP = 3  # steps that do not count, as in the median


@click.command("report-measurement")
@click.argument("run", type=click.Path(dir_okay=False))
@click.option("--model", required=True, help="What the model is called, such as Llama-3-8B.")
@click.option("--note", default="", help="What others should know: the links, other work there.")
@click.option(
    "-o", "--output", type=OutputFile(), help="CSV file that gets one row more; made if missing."
)
@options.as_json
def command(run: str, model: str, note: str, output: str | None, as_json: bool) -> None:
    """Turn RUN, an output of `run --json`, into one row of CSV.

    The row says what ran, what was predicted and what was measured, and nothing
    about the host but what the plan says of the machine. Rows of many machines
    show how far predictions are off there.
    """
    row = measurement_row(read_run(run), run, model, note)
    if output:
        write_text(output, _with_row(output, row))
    if as_json:
        print_json({"file": output, "row": row})
    elif output:
        say(f"added a row to {output}; send it to the project as an issue or a change")
    else:
        click.echo(_lines([dict(zip(COLUMNS, COLUMNS, strict=True)), row]), nl=False)


def measurement_row(run: RunOutput, file: str, model: str, note: str) -> dict[str, str]:
    """The values of `COLUMNS`; raises `UsageError` for a run that does not say what ran."""
    missing = [name for name in SETUP if name not in run.setup]
    if missing or not run.steps:
        raise UsageError(
            f"{file} does not say {missing[0] if missing else 'how long each step took'}: it was"
            " written by an older version; run it again"
        )
    counted = run.steps[min(_WARM_UP, len(run.steps) // 2) :]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": model,
        **{name: run.setup[name] for name in SETUP},
        "predicted_step_seconds": f"{run.predicted_seconds:.6g}",
        "measured_step_seconds": f"{run.measured_seconds:.6g}",
        "fastest_step_seconds": f"{min(counted):.6g}",
        "slowest_step_seconds": f"{max(counted):.6g}",
        "steps": str(len(counted)),
        "predicted_peak_bytes": _number(run.predicted_bytes),
        "measured_peak_bytes": _number(run.measured_bytes),
        "note": note,
    }


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _with_row(file: str, row: dict[str, str]) -> str:
    """The text of a file with a row more; raises `UsageError` where it has other columns."""
    if not Path(file).exists():
        return _lines([dict(zip(COLUMNS, COLUMNS, strict=True)), row])
    try:
        text = read_text_up_to(file, _LARGEST)
    except (OSError, UnicodeDecodeError, FileSizeError) as e:
        raise UsageError(f"cannot read {file}: {getattr(e, 'strerror', None) or e}") from e
    if next(csv.reader(io.StringIO(text)), []) != list(COLUMNS):
        raise UsageError(f"{file} has other columns than these rows; give another file")
    return text + ("" if text.endswith("\n") else "\n") + _lines([row])


def _lines(rows: list[dict[str, str]]) -> str:
    found = io.StringIO()
    csv.DictWriter(found, COLUMNS, lineterminator="\n").writerows(rows)
    return found.getvalue()
