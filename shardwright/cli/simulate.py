"""`shardwright simulate`: the timeline of a planned step, as a trace for Perfetto."""

from __future__ import annotations

import textwrap

import click

from shardwright.cli import options
from shardwright.cli.console import print_json
from shardwright.cli.errors import UsageError
from shardwright.cost.pipeline_step import mini_batches, pipeline_timeline
from shardwright.cost.step import timeline
from shardwright.cost.timeline import Stream, Timeline
from shardwright.ir.explain import WIDTH
from shardwright.ir.files import write_whole
from shardwright.ir.layout import Seconds
from shardwright.ir.pipeline import PipelineError
from shardwright.ir.plan import Plan
from shardwright.report.summary import summary
from shardwright.report.trace import chrome_trace
from shardwright.report.units import milliseconds


@click.command("simulate")
@click.argument("plan", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Trace file to write.")
@options.as_json
def command(plan: str, output: str | None, as_json: bool) -> None:
    """Show when everything of the step planned in PLAN runs, on a rank's or a stage's streams."""
    loaded = Plan.load(plan)
    try:
        found = timeline(loaded) if loaded.pipeline is None else pipeline_timeline(loaded)
    except PipelineError as e:
        raise UsageError(str(e)) from e
    if output:
        try:
            write_whole(output, chrome_trace(found, loaded))
        except OSError as e:
            raise UsageError(f"cannot write {output}: {e.strerror}; choose another path") from e
    if as_json:
        print_json(content(found, output) | {"mini_batches": mini_batches(loaded)})
        return
    click.echo(summary(loaded))
    click.echo(textwrap.fill(_in_words(found, mini_batches(loaded)), WIDTH))
    if output:
        click.echo(f"wrote {output}; open it in https://ui.perfetto.dev or chrome://tracing")


def content(found: Timeline, output: str | None) -> dict[str, object]:
    """What `simulate --json` prints; seconds are of one step, or of `mini_batches`."""
    return {
        "step_seconds": found.seconds,
        "tracks": [
            {"ranks": ranks, "busy_seconds": busy, "exposed_seconds": alone, "stream": stream}
            for ranks, stream, busy, alone in _tracks(found)
        ],
        "tasks": len(found.tasks),
        "file": output,
    }


def _tracks(found: Timeline) -> list[tuple[str, str, Seconds, Seconds]]:
    """Every track: how long it is busy, and how long while its ranks' other one is not."""
    rows = []
    tracks = list(dict.fromkeys(task.track for task in found.tasks))
    for track in tracks:
        (other,) = (stream for stream in Stream if stream is not track.stream)
        alone = found.alone(track, track._replace(stream=other))
        rows.append((track.ranks, track.stream.value, found.busy(track), alone))
    return rows


def _in_words(found: Timeline, steps: int) -> str:
    parts = [
        f"{ranks}: {milliseconds(busy)} of {stream}"
        + (f", {milliseconds(alone)} of it exposed" if stream == Stream.COMMUNICATION else "")
        for ranks, stream, busy, alone in _tracks(found)
    ]
    what = "a step" if steps == 1 else f"for {steps} mini-batches from an empty pipeline on"
    return f"{milliseconds(found.seconds)} {what}; " + "; ".join(parts)
