"""`shardwright run`: plans if needed, trains with torchrun, verifies, compares with predictions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli import groups, options
from shardwright.cli.commands.plan import print_answer, print_verdict
from shardwright.cli.commands.verify import NOT_EQUAL, content, verified
from shardwright.cli.console import print_json, say, wrapped
from shardwright.cli.errors import UsageError
from shardwright.cli.groups import MachineOptions, PlanOfTarget
from shardwright.cli.plan_cache import PlanCache, cache_key
from shardwright.cli.planning import capturing, checked_plan, choosing, named_machines, searching
from shardwright.cli.runs.outcome import comparison
from shardwright.cli.runs.outcome import content as run_content
from shardwright.cli.runs.run_options import SAVING, RunOptions, check_started_once, run_options
from shardwright.cli.runs.verifying import reason_against
from shardwright.cli.tracing import NOT_TRACED, OPEN, check_steps, check_traceable, write_steps
from shardwright.ir.options.numerics import CHOICES
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Plan
from shardwright.planner.memory_limits import limit_on
from shardwright.report.other_plans import other_plans
from shardwright.report.summary import summary
from shardwright.train.targets.target_text import Target

if TYPE_CHECKING:
    from shardwright.train.job import Job

# Options of planning, which have no effect on a given plan.
_PLANNING = (
    *("machine", "figures", "time_operators", "memory_limit", "seconds", "micro_batches", "stages"),
    *("processes", "allow_async", "loss_chunks", "mlp_chunks", *CHOICES),
)
_OTHER_TRAINING = (
    "not compared with one device: an asynchronous plan trains otherwise (docs/how-to/async.md);"
    " compare the losses of runs"
)


@click.command("run")
@groups.target
@click.argument("plan", type=click.Path(dir_okay=False), required=False)
@click.option("--devices", type=options.ranks(1), help="Ranks to start on this host.")
@groups.machine(default="here", timed=True)
@groups.plan_options(
    *(
        "memory_limit",
        "constraints",
        "seconds",
        "processes",
        "micro_batches",
        "stages",
        "allow_async",
        "loss_chunks",
        "mlp_chunks",
    )
)
@groups.numerics
@run_options
@options.as_json
def command(
    target: Target,
    plan: str | None,
    devices: int | None,
    machine: MachineOptions,
    wanted: PlanOptions,
    numerics: Mapping[str, str],
    training: RunOptions,
    as_json: bool,
) -> None:
    """Train TARGET on this host, under PLAN or the best plan of a search.

    With --checkpoint the run resumes from its latest checkpoint, also on another number of devices.
    """
    check_started_once("run")
    _check_together(plan, wanted, training)
    if plan is not None:
        captured, chosen = checked_plan.planned(PlanOfTarget(target, plan), devices)
        _check_job(captured.job, training)
        if not as_json:
            click.echo(f"{plan}: {summary(chosen)}")
    else:
        if devices is None:
            raise UsageError("without a plan file, give --devices, the number of ranks to plan for")
        captured = _captured(target, devices, machine, wanted, numerics)
        _check_job(captured.job, training)
        chosen = _planned(captured, devices, machine, wanted, training, quiet=as_json)
    _trained(target, captured, chosen, training, as_json=as_json)


def _captured(
    target: Target,
    devices: int,
    machine: MachineOptions,
    wanted: PlanOptions,
    numerics: Mapping[str, str],
) -> capturing.CapturedTarget:
    """The captured target, after the options are checked against the machine.

    This host is measured only after the target was loaded; a preset has the given number of
    devices.
    """
    named = MachineOptions(f"{devices}xcpu", {}) if machine.is_here else machine
    known = named_machines.machine_of(named, devices)
    searching.check([known], wanted, target.batch)
    here = machine.is_here
    return capturing.capture(
        target,
        numerics=numerics,
        machine=None if here else known,
        memory_limit=wanted.memory_limit,
        fast_halves=named_machines.host_fast_halves() if here else known.device.fast_halves,
    )


def _planned(
    captured: capturing.CapturedTarget,
    devices: int,
    machine: MachineOptions,
    wanted: PlanOptions,
    training: RunOptions,
    *,
    quiet: bool,
) -> Plan:
    """The plan cached beside the checkpoints, or the fastest plan of a search."""
    saving, seconds = training.launch.saving, machine.timing_seconds
    cache = PlanCache(Path(saving.folder) / "plans") if saving is not None else None
    known = named_machines.machine_of(machine, devices, tune_host=training.launch.tune_host)
    key = cache_key(captured, known, wanted, seconds) if cache is not None else ""
    if cache is not None and (found := cache.find(key)) is not None:
        if not quiet:
            click.echo(f"{cache.file(key)}: {summary(found)}")
        return found
    choice = choosing.choose(captured, known, "time", wanted, seconds)
    chosen = choice.plan
    if cache is not None:
        cache.keep(key, chosen)
    if not quiet:
        limit = limit_on(known, wanted.memory_limit)
        searched = searching.searches_pipelines(known, wanted, chosen)
        print_verdict(choice, limit, captured, pipelines=searched)
        others = other_plans(chosen, choice.frontier, limit)
        print_answer(choice, others, limit, choosing.avoidable(captured, known, choice))
    return chosen


def _trained(
    target: Target,
    captured: capturing.CapturedTarget,
    plan: Plan,
    training: RunOptions,
    *,
    as_json: bool,
) -> None:
    """Train, compare with the prediction and with one device; ends with the run's status."""
    from shardwright.train.launch import launch

    if training.trace:
        check_traceable(plan)
    ranks = f"{plan.devices} rank{'s' * (plan.devices > 1)}"
    click.echo(f"\ntraining {target.text} on {ranks}; memory is {_counted()}", err=as_json)
    done = launch(target, plan, training.launch, stdout=sys.stderr if as_json else None)
    if done.status != 0:
        click.echo(f"shardwright: training ended with status {done.status}", err=True)
        sys.exit(done.status)
    written = write_steps(training.trace, plan, done.traces) if training.trace else None
    against = _reason_against(captured, plan, training)
    report = verified(captured.job, plan) if against is None else None
    if as_json:
        further = {
            "tuned_host": training.launch.tune_host,
            "trace": written,
            "verify": content(report) if report else None,
            "not_verified": against or None,
        }
        print_json(run_content(plan, done) | further)
    else:
        say(comparison(plan, done))
        if training.trace:
            say(f"wrote {written}; {OPEN}" if written else NOT_TRACED)
        if plan.is_asynchronous:
            click.echo(_OTHER_TRAINING)
        if report:
            for line in str(report).splitlines():
                click.echo(wrapped(line))
        if against:
            say(
                f"not verified: a comparison with one device in float64 {against}; --verify makes"
                " it, and `shardwright verify` compares a smaller model, as with --set"
            )
    sys.exit(NOT_EQUAL if report and not report.ok else 0)


def _reason_against(
    captured: capturing.CapturedTarget, plan: Plan, training: RunOptions
) -> str | None:
    """The text on why a run is not verified, empty if it was not to be; None if it is."""
    # An asynchronous plan gives other results than one device, so nothing is compared.
    if plan.is_asynchronous or training.verify is False:
        return ""
    if training.verify:
        return None
    return reason_against(captured.graph, plan) or None


def _counted() -> str:
    """Names the memory in the line of a step (`train.loop.peak_bytes`)."""
    import torch

    on_gpu = torch.cuda.is_available()
    return f"the peak of {'torch on a GPU' if on_gpu else 'a whole process'} so far"


def _check_together(plan: str | None, wanted: PlanOptions, training: RunOptions) -> None:
    """Raise `UsageError` for options that exclude each other or have no effect together."""
    if training.launch.tensorboard is not None:
        from shardwright.train.tensorboard import require_tensorboard

        require_tensorboard()
    if plan is not None:
        given = [*map(str, wanted.constraints), *options.given(*_PLANNING)]
        if given:
            raise UsageError(
                f"{plan} is finished, {given[0]!r} cannot change it; leave out the plan file to"
                " plan again"
            )
    if training.launch.saving is None:
        if given := options.given(*SAVING):
            raise UsageError(f"{given[0]} is an option of checkpoints: give --checkpoint DIR, too")
        if training.launch.max_restarts:
            raise UsageError(
                "--max-restarts starts from the latest checkpoint: give --checkpoint DIR"
            )


def _check_job(job: Job, training: RunOptions) -> None:
    """Raise the errors of `job` that would end a run at its start or after its last step."""
    from shardwright.train.checkpoint.export import check_export, check_weights
    from shardwright.train.targets.target import build_model

    launch = training.launch
    job.require_training(launch.steps)
    job.check_data()
    if training.trace:
        check_steps(launch.steps or job.last_step)
    if launch.weights is not None:
        check_weights(launch.weights)
    if launch.export is not None:
        check_export(build_model(job, meta=True), launch.export)
