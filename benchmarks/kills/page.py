"""How the result of `run` is shown."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.page import table

TITLE = "Ranks are killed at random moments"


def body(result: dict[str, Any]) -> str:
    """How many were killed when, and the outcome."""
    by_moment = result["kills_by_moment"]
    rows = [[moment, str(count)] for moment, count in sorted(by_moment.items())]
    by_plan = Counter[str]()
    for one in result["runs"]:
        by_plan[one["plan"]] += one["kills"]
    plans = [[plan, str(count)] for plan, count in by_plan.items()]
    kept = "the losses of undisturbed runs, bit by bit" if result["same_curve"] else "OTHER LOSSES"
    return (
        "A job on two ranks saves every other step, under one plan after the other; `kill -9`"
        " takes one of them, torchrun starts both again, and they go on from the latest checkpoint."
        " In runs of"
        f" {max(one['kills'] for one in result['runs'])} kills:\n\n"
        f"{table(['kill -9', 'times'], [*rows, ['in all', str(result['kills'])]])}\n\n"
        f"{table(['plan', 'kills'], plans)}\n\n"
        f"Ranks resumed {result['resumed']} times, and the {result['steps']} steps ended with"
        f" {kept}. Checkpoints that were torn: {len(result['torn_checkpoints'])}; that had to be"
        f" passed over: {result['passed_over']}; files left behind: {len(result['left_aside'])}."
        " Starts or steps that stood still, were named and ended:"
        f" {len(result['stood_still'])}."
    )
