"""Explains an out-of-memory error of a rank by the predicted memory, and gives advice."""

from __future__ import annotations

import torch

from shardwright.ir.memory import PARTS
from shardwright.ir.plan import Plan

_GIB = 2**30


class RankOutOfMemoryError(RuntimeError):
    """A rank could not allocate memory on its device."""


def explained(plan: Plan, device: torch.device, rank: int, error: BaseException) -> str:
    """One line about an out-of-memory `error` on `rank` in a step of `plan`."""
    asked = ", ".join(str(error).split(". ")[:2])  # the rest of the text is about the whole device
    return (
        f"rank {rank} has no memory left: {asked}; {_allocator(device)}{_predicted(plan)}; plan"
        " with a lower --memory-limit or a smaller batch, and `shardwright explain PLAN` shows"
        " which modules need it"
    )


def _allocator(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - reserved
    return (
        f"tensors took {most / _GIB:.2f} GiB at most, torch's allocator holds"
        f" {reserved / _GIB:.2f} GiB of {total / _GIB:.2f} GiB, and {others / _GIB:.2f} GiB are the"
        " driver's or of other programs; "
    )


def _predicted(plan: Plan) -> str:
    text = f"the plan predicts {plan.peak_bytes / _GIB:.2f} GiB of tensors"
    if plan.memory is None:
        return text
    sizes = ((PARTS[name], size) for name, size in plan.memory.parts().items() if size)
    parts = " + ".join(f"{name} {size / _GIB:.2f}" for name, size in sizes)
    at = f", at {plan.memory.at}" if plan.memory.at else ""
    return f"{text} ({parts}{at})"
