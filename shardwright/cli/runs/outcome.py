"""The summary of a run: losses, and predicted beside measured figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.cli.version import version
from shardwright.ir.memory import as_json as memory_content
from shardwright.ir.plan import Plan
from shardwright.report.headline import headline
from shardwright.report.summary import summary
from shardwright.report.units import milliseconds, size

if TYPE_CHECKING:
    from shardwright.train.launch import Training


def content(plan: Plan, training: Training) -> dict[str, object]:
    """The output of `run --json`, without the comparison with one device."""
    return {
        "devices": plan.devices,
        "mesh": str(plan.mesh),
        "summary": summary(plan),
        "predicted_step_seconds": plan.step_seconds,
        "measured_step_seconds": training.step_seconds,
        "measured_steps": [record.seconds for record in training.records],
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_memory": memory_content(plan.memory),
        "measured_peak_bytes": training.peak_bytes,
        "losses": [record.loss for record in training.records],
        "expert_skew": _skew_content(plan, training),
        "setup": _setup(plan),
    }


def _setup(plan: Plan) -> dict[str, str]:
    """The plan, the call, the machine and versions, in words."""
    import torch

    tensors = (f"{one.key} {one.dtype}{list(one.shape)}" for one in plan.inputs)
    return {
        "plan": plan.name,
        "strategy": headline(plan),
        "machine": plan.machine,
        "devices": str(plan.devices),
        "mesh": str(plan.mesh),
        "inputs": "; ".join(tensors),
        "optimizer": plan.optimizer,
        "numerics": str(plan.numerics),
        "micro_batches": str(plan.micro_batches),
        "compiled": "yes" if plan.compiled else "no",
        "graph": plan.fingerprint,
        "shardwright": version(),
        "torch": torch.__version__,
    }


def _skew_content(plan: Plan, training: Training) -> dict[str, float] | None:
    """Rows of the busiest device over the mean: predicted, and measured where experts are split."""
    if training.routing is None:
        return None
    found = training.routing
    return {"stated": plan.expert_skew, "measured": found.busiest, "most": found.most}


def comparison(plan: Plan, training: Training) -> str:
    """Loss from first to last step; predicted against measured step time and peak memory."""
    measured = training.step_seconds
    if measured is None:
        return "no step was left to do: the checkpoint has them all; --steps N trains longer"
    first, last = training.records[0], training.records[-1]
    memory = training.peak_bytes
    predicted = plan.peak_bytes + (plan.memory.libraries if plan.memory else 0)
    counted = (
        f"\npeak memory: predicted {size(predicted)}, measured {size(memory)} of tensors,"
        f" predicted / measured {predicted / memory:.2f}"
        f"{f'; predicted to be at {plan.memory.at}' if plan.memory and plan.memory.at else ''}"
        if memory
        else ""
    )
    routed = (
        f"\nrows of experts, busiest device over the mean: stated {plan.expert_skew:g},"
        f" {training.routing}"
        if training.routing
        else ""
    )
    return (
        f"\nloss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}\n"
        f"step time: predicted {milliseconds(plan.step_seconds)}, measured"
        f" {milliseconds(measured)} (median), predicted / measured"
        f" {plan.step_seconds / measured:.2f}"
        f"{counted}{routed}"
    )
