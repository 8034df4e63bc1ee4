"""Writes Chrome traces of steps, simulated and measured, and reads them."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.cli.errors import UsageError
from shardwright.cli.writing import write_text
from shardwright.ir.atomic_io import FileSizeError, read_text_up_to
from shardwright.ir.plan import Plan, PlanError
from shardwright.ir.timeline import Timeline
from shardwright.report.timelines.profiled import profiled
from shardwright.report.timelines.trace import chrome_trace

NOT_TRACED = "no step was traced: the run went on from a checkpoint and had too few left"
_LARGEST = 2**30  # bytes of a trace; one of a step of a thousand layers has some hundred MiB
OPEN = "open it in https://ui.perfetto.dev or chrome://tracing"


def simulated_step(plan: Plan) -> Timeline:
    """The simulated timeline of the plan's step.

    Raises `PlanError` if the step was not simulated.
    """
    if plan.timeline is not None:
        return plan.timeline
    how = "`shardwright recost TARGET plan.json` simulates it"
    if plan.pipeline is not None:
        how = "plan again, as plans with stages are not costed again"
    raise PlanError(f"the plan has no timeline, because its step was not simulated; {how}")


def trace_text(file: str) -> str:
    """The text of a Chrome trace; raises `UsageError` for a file that cannot be read."""
    try:
        return read_text_up_to(file, _LARGEST)
    except (OSError, UnicodeDecodeError, FileSizeError) as e:
        binary = isinstance(e, UnicodeDecodeError)
        reason = "it is no text" if binary else getattr(e, "strerror", None) or e
        raise UsageError(f"cannot read {file}: {reason}") from e


def check_steps(steps: int) -> None:
    """Raise `UsageError` if a run of `steps` is too short to trace a step."""
    from shardwright.train.traced_step import NTH

    if steps < NTH:
        raise UsageError(f"--trace shows step {NTH} of a run, and this one has {steps}; take more")


def check_traceable(plan: Plan) -> None:
    """Raise `UsageError` if a step of the plan cannot be traced."""
    if plan.is_asynchronous:
        raise UsageError(
            "--trace shows one step, and steps of an asynchronous plan overlap; leave it out, or"
            " see them simulated by `shardwright simulate`"
        )
    simulated_step(plan)


def write_steps(output: str, plan: Plan, traces: Mapping[int, str]) -> str | None:
    """Write the simulated step and the recorded steps; None if no rank recorded one."""
    if not traces:
        return None
    steps = [profiled(text, f"measured, rank {rank}") for rank, text in sorted(traces.items())]
    write_text(output, chrome_trace(simulated_step(plan), plan, steps))
    return output
