"""The page of the result of `run --parts`."""

from __future__ import annotations

from typing import Any

from benchmarks.efficiency import page

TITLE = "Same strategy in four micro-batches: against FSDP2 and torch.distributed.pipelining"


def body(result: dict[str, Any]) -> str:
    """Ratios by model and strategy."""
    return page.body(result)
