"""`shardwright verify`: compares a plan with one device, on local processes."""

from __future__ import annotations

import sys
from math import isfinite
from typing import TYPE_CHECKING

import click

from shardwright.cli import groups, options
from shardwright.cli.console import print_json, working, wrapped
from shardwright.cli.groups import PlanOfTarget
from shardwright.cli.planning import checked_plan
from shardwright.cli.runs.run_options import check_started_once
from shardwright.ir.plan import Plan

if TYPE_CHECKING:
    from shardwright.api import Report
    from shardwright.train.job import Job

NOT_EQUAL = 1  # exit status of a plan whose results differ


@click.command("verify")
@groups.target_and_plan
@options.as_json
def command(given: PlanOfTarget, as_json: bool) -> None:
    """Compare PLAN with the module itself: outputs, every gradient and buffer, one step."""
    check_started_once("verify")
    captured, chosen = checked_plan.planned(given)
    report = verified(captured.job, chosen)
    if as_json:
        print_json(content(report))
    else:
        for line in str(report).splitlines():
            click.echo(wrapped(line))
    sys.exit(0 if report.ok else NOT_EQUAL)


def verified(job: Job, plan: Plan) -> Report:
    """Run the job's example batch under `plan` and on one device."""
    with working(f"verifying on {plan.devices} local processes"):
        from shardwright import api
        from shardwright.train.targets.target import build_model

        args, kwargs = job.call()
        return api.verify(build_model(job), plan, args, kwargs)


def content(report: Report) -> dict[str, object]:
    """The output of `verify --json`."""
    return {
        "ok": report.ok,
        "loss_error": report.loss_error,
        "max_gradient_error": report.max_gradient_error,
        "max_buffer_error": report.max_buffer_error,
        "max_parameter_error": report.max_parameter_error,
        "capture_error": report.capture_error if isfinite(report.capture_error) else None,
        "compared_in": report.compared_in,
        "not_compared": report.not_compared,
        "worst": str(report.worst),
        "notes": list(report.notes),
    }
