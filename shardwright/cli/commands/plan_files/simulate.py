"""`shardwright simulate`: writes the timeline of a planned step as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from shardwright.cli import options
from shardwright.cli.console import print_json, say, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.tracing import OPEN, simulated_step, trace_text
from shardwright.cli.writing import OutputFile, write_text
from shardwright.ir.layout import Seconds
from shardwright.ir.timeline import Stream, Timeline
from shardwright.plan_io.files import load_plan
from shardwright.planner.gc_pause import paused_to_the_end
from shardwright.report.summary import summary
from shardwright.report.timelines.profiled import Profiled, profiled
from shardwright.report.timelines.trace import chrome_trace
from shardwright.report.units import milliseconds
from shardwright.simulate.time.async_pipeline import mini_batches


@click.command("simulate")
@click.argument("plan", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=OutputFile(), help="Trace file to write.")
@click.option(
    "--measured",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Chrome trace by torch.profiler, whose last step is written to the same file.",
)
@options.as_json
@paused_to_the_end()
def command(plan: str, output: str | None, measured: tuple[str, ...], as_json: bool) -> None:
    """Show the timeline of a step of PLAN, on the streams of a rank or of each stage."""
    loaded = load_plan(plan)
    if measured and not output:
        raise UsageError("--measured is written to the trace: give its path with -o")
    found = simulated_step(loaded)
    steps = [_read(file) for file in measured]
    if output:
        write_text(output, chrome_trace(found, loaded, steps))
    if as_json:
        seen = {"measured_step_seconds": [step.seconds for step in steps]}
        print_json(content(found, output) | {"mini_batches": mini_batches(loaded)} | seen)
        return
    say(summary(loaded))
    click.echo(wrapped(_in_words(found, mini_batches(loaded)), 0))
    for step in steps:
        click.echo(f"{step.label}: {milliseconds(step.seconds)}")
    if output:
        say(f"wrote {output}; {OPEN}")


def _read(file: str) -> Profiled:
    return profiled(trace_text(file), f"measured, {Path(file).name}")


def content(found: Timeline, output: str | None) -> dict[str, object]:
    """The output of `simulate --json`; seconds are of one step, or of `mini_batches`."""
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
    """For every track its busy time, and the part in which its ranks' other stream is idle."""
    rows = []
    tracks = list(dict.fromkeys(task.track for task in found.tasks))
    for track in tracks:
        others = [o for o in tracks if o.ranks == track.ranks and o.stream is not track.stream]
        stream = f"{track.stream.value} {track.axis}".rstrip()
        rows.append((track.ranks, stream, found.busy(track), found.alone(track, *others)))
    return rows


_BESIDE = {Stream.COMPUTE.value: ", updates, and what messages slow down"}


def _in_words(found: Timeline, steps: int) -> str:
    parts = [
        f"{ranks}: {milliseconds(busy)} of {stream}{_BESIDE.get(stream, '')}"
        + (
            f", {milliseconds(alone)} of it exposed"
            if stream.startswith(Stream.COMMUNICATION)
            else ""
        )
        for ranks, stream, busy, alone in _tracks(found)
    ]
    what = "a step" if steps == 1 else f"for {steps} mini-batches from an empty pipeline on"
    return f"{milliseconds(found.seconds)} {what}; " + "; ".join(parts)
