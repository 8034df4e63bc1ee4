"""`shardwright run`: plan if needed, train with torchrun, verify, compare with the estimate."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import options, planning
from shardwright.cli.commands.plan import print_choice
from shardwright.cli.commands.verify import NOT_EQUAL, content, verified
from shardwright.cli.console import print_json
from shardwright.cli.errors import UsageError
from shardwright.cli.outcome import comparison
from shardwright.cli.outcome import content as run_content
from shardwright.cli.plan_cache import PlanCache, cache_key
from shardwright.cli.tracing import NOT_TRACED, OPEN, check_steps, check_traceable, write_steps
from shardwright.cli.writing import OutputFile, OutputFileOrFolder, OutputFolder
from shardwright.ir.numerics import CHOICES
from shardwright.ir.plan import Plan
from shardwright.planner.memory_limits import limit_on
from shardwright.report.summary import summary
from shardwright.report.text.explain import WIDTH

if TYPE_CHECKING:
    from shardwright.train.job import Job

# Options of planning, without effect on a plan that is made, and of checkpoints.
_PLANNING = (
    *("machine", "figures", "time_operators", "memory_limit", "seconds", "micro_batches", "stages"),
    *("allow_async", *CHOICES),
)
_SAVING = ("every", "keep", "wait_for_saves")
_OTHER_TRAINING = (
    "not compared with one device: an asynchronous plan trains otherwise (docs/async.md);"
    " compare the losses of runs"
)


@click.command("run")
@options.target
@click.argument("plan", type=click.Path(dir_okay=False), required=False)
@click.option("--devices", type=options.ranks(1), help="Ranks to start on this host.")
@click.option(
    "--machine",
    default="here",
    show_default=True,
    callback=options.chosen_machine,
    help="Machine to plan for.",
)
@options.set_machine
@options.time_operators
@options.memory_limit
@options.constraints
@options.seconds
@options.habits
@options.micro_batches
@options.stages
@options.allow_async
@click.option("--steps", type=click.IntRange(min=1), help="Steps to train, instead of the job's.")
@click.option(
    "--checkpoint",
    "folder",
    type=OutputFolder(),
    help="Folder to go on from if it holds a checkpoint, and to save to.",
)
@click.option(
    "--every", type=click.IntRange(min=1), default=100, show_default=True, help="Steps between."
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many checkpoints stay.",
)
@click.option(
    "--wait-for-saves",
    is_flag=True,
    help="Steps wait until a checkpoint is written, which needs no copy of the run on the host.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often torchrun starts the ranks again when one dies.",
)
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=options.finite,
    help="Seconds without a step after which the rank that holds it up is named and all end; 600.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=options.finite,
    help="Seconds for one part of a start (joining, building, reading a checkpoint), after which"
    " the rank that holds it up is named and all end; 1800.",
)
@click.option(
    "--weights",
    type=click.Path(exists=True),
    help="Start from these: a .safetensors file, or a Hugging Face folder.",
)
@click.option("--compile", "compiled", is_flag=True, help="Run steps through torch.compile.")
@click.option("--tensorboard", type=OutputFolder(), help="Folder for TensorBoard's event files.")
@click.option(
    "--trace",
    type=OutputFile(),
    help="File for the simulated step and the third one of the run, measured, side by side.",
)
@click.option(
    "--export",
    type=OutputFileOrFolder(".safetensors", make_folder=True),
    help="Write the weights at the end: to a .safetensors file, or a Hugging Face folder.",
)
@click.option("--verify/--no-verify", default=True, help="Compare with one device afterwards.")
@options.as_json
def command(
    target: str,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    plan: str | None,
    devices: int | None,
    machine: str,
    figures: Mapping[str, object],
    time_operators: float,
    memory_limit: int | str | None,
    constraints: tuple[str, ...],
    seconds: float,
    habits: Mapping[str, str],
    micro_batches: tuple[int, ...],
    stages: tuple[int, ...],
    allow_async: bool,
    steps: int | None,
    folder: str | None,
    every: int,
    keep: int,
    wait_for_saves: bool,
    max_restarts: int,
    stall_timeout: float | None,
    start_timeout: float | None,
    weights: str | None,
    compiled: bool,
    tensorboard: str | None,
    trace: str | None,
    export: str | None,
    verify: bool,
    as_json: bool,
) -> None:
    """Train TARGET on this host, under PLAN or the best plan there is.

    With --checkpoint the run goes on where it was saved, on as many devices as there are now.
    """
    if tensorboard is not None:
        from shardwright.train.tensorboard import require_tensorboard

        require_tensorboard()
    _check_together(plan, constraints, folder)
    if max_restarts and folder is None:
        raise UsageError("--max-restarts starts from the latest checkpoint: give --checkpoint DIR")
    if plan is not None:
        given = options.PlanOfTarget(target, batch, seq, settings, plan)
        captured, chosen = planning.planned(given, devices)
        steps = steps or captured.job.steps
        _check_job(captured.job, steps, weights, export, trace is not None)
        if not as_json:
            click.echo(f"{plan}: {summary(chosen)}")
    else:
        if devices is None:
            raise UsageError("without a plan file, --devices says how many ranks to plan for")
        wishes = planning.Wishes(
            constraints,
            seconds,
            micro_batches=micro_batches,
            stages=stages,
            allow_async=allow_async,
            timing_seconds=time_operators if machine == "here" else 0.0,
        )
        # This host is measured when the target is known to be one: a preset has as many devices.
        named = f"{devices}xcpu" if machine == "here" else machine
        known = planning.machine_of(named, devices, {} if machine == "here" else figures)
        planning.check([known], wishes, batch)
        captured = planning.capture(
            target,
            batch,
            seq,
            settings,
            habits=habits,
            machine=None if machine == "here" else known,
            memory_limit=memory_limit,
        )
        steps = steps or captured.job.steps
        _check_job(captured.job, steps, weights, export, trace is not None)
        chosen = _planned(
            captured,
            machine,
            figures,
            devices,
            memory_limit,
            wishes,
            cache=PlanCache(Path(folder) / "plans") if folder is not None else None,
            quiet=as_json,
        )

    from shardwright.train.launch import Saving, launch

    if trace:
        check_traceable(chosen)
    click.echo(f"\ntraining {target} on {chosen.devices} ranks", err=as_json)
    training = launch(
        target,
        chosen,
        steps,
        (batch, seq),
        settings=settings,
        saving=Saving(folder, every, keep, wait_for_saves) if folder is not None else None,
        max_restarts=max_restarts,
        stall_timeout=stall_timeout,
        start_timeout=start_timeout,
        export=export,
        options=_further(weights, compiled, tensorboard),
        traced=bool(trace),
        stdout=sys.stderr if as_json else None,
    )
    if training.status != 0:
        click.echo(f"shardwright: training ended with status {training.status}", err=True)
        sys.exit(training.status)
    written = write_steps(trace, chosen, training.traces) if trace else None
    # An asynchronous plan trains otherwise than one device, so there is nothing to compare.
    report = verified(captured.job, chosen) if verify and not flows(chosen) else None
    if as_json:
        further = {"trace": written, "verify": content(report) if report else None}
        print_json(run_content(chosen, training) | further)
    else:
        click.echo(comparison(chosen, training))
        if trace:
            click.echo(f"wrote {written}; {OPEN}" if written else NOT_TRACED)
        if flows(chosen):
            click.echo(_OTHER_TRAINING)
        if report:
            click.echo(textwrap.fill(str(report), WIDTH, subsequent_indent="  "))
    sys.exit(NOT_EQUAL if report and not report.ok else 0)


def _check_together(plan: str | None, constraints: tuple[str, ...], folder: str | None) -> None:
    """Raise `UsageError` for options that another one makes idle, or forbids."""
    if plan is not None and (given := [*constraints, *options.given(*_PLANNING)]):
        raise UsageError(
            f"{plan} is made already, {given[0]!r} cannot change it; leave the plan out to plan"
            " again"
        )
    if folder is None and (given := options.given(*_SAVING)):
        raise UsageError(f"{given[0]} is about checkpoints: give --checkpoint DIR, too")


def _check_job(job: Job, steps: int, weights: str | None, export: str | None, trace: bool) -> None:
    """Raise what would end a run of `job` at its start, or after its last step."""
    from shardwright.train.checkpoint.export import check_export, check_weights
    from shardwright.train.targets.target import build_model

    job.check_data()
    if trace:
        check_steps(steps)
    if weights is not None:
        check_weights(weights)
    if export is not None:
        check_export(build_model(job, meta=True), export)


def flows(plan: Plan) -> bool:
    """Whether the plan is asynchronous."""
    return plan.pipeline is not None and plan.pipeline.weights is not None


def _further(weights: str | None, compiled: bool, tensorboard: str | None) -> list[str]:
    """Options that the worker takes as they are."""
    found = ["--weights", str(Path(weights).absolute())] if weights else []
    found += ["--compile"] if compiled else []
    return found + (["--tensorboard", str(Path(tensorboard).absolute())] if tensorboard else [])


def _planned(
    captured: planning.Captured,
    machine: str,
    figures: Mapping[str, object],
    devices: int,
    memory_limit: int | str | None,
    wishes: planning.Wishes,
    *,
    cache: PlanCache | None,
    quiet: bool,
) -> Plan:
    known = planning.machine_of(machine, devices, figures)
    limit = limit_on(known, memory_limit)
    key = cache_key(captured, known, limit, wishes) if cache is not None else ""
    if cache is not None and (found := cache.find(key)) is not None:
        if not quiet:
            click.echo(f"{cache.file(key)}: {summary(found)}")
        return found
    chosen, frontier = planning.choose(captured, known, "time", memory_limit, wishes)
    if cache is not None:
        cache.keep(key, chosen)
    if not quiet:
        print_choice(chosen, frontier, limit, "time", pipelines=bool(wishes.stages))
    return chosen
