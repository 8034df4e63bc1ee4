"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "A host is lost, and comes back"


def body(result: dict[str, Any]) -> str:
    """What happened when, and how far the losses are from one device's."""
    rows = [
        [one["what"], f"{one['seconds']:.1f}", str(one["checkpoint"])] for one in result["told"]
    ]
    done = "Every step was done" if result["every_step_once"] else "STEPS ARE MISSING"
    return (
        "Two hosts, network namespaces joined by a link of"
        f" {result['link']}, each run `torchrun --nnodes 1:2`, with a plan for one device and one"
        " for two. The link of one is unplugged and its processes are killed; the other, which"
        f" hears nothing of it, notices after {result['stall_seconds']:g} s without a step.\n\n"
        f"{table(['', 's', 'latest checkpoint, step'], rows)}\n\n"
        f"{done}; losses differ from those of one device by {result['largest_difference']:.1e} at"
        f" most (bound: {result['bound']:g}, float64)."
    )
