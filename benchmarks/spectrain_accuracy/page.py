"""How the result of `run` is shown: what it comes to, a table, and the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.page import table
from benchmarks.spectrain_accuracy.plot import CURVES, ERRORS

TITLE = "SpecTrain: what asynchronous pipelines learn"
LANGUAGE = ("transformer", "lstm")
PLAIN = ("synchronous", "stale", "stash")  # which predict and discount nothing
Row = dict[str, Any]


def body(result: Row) -> str:
    """What it comes to; docs/how-to/async.md has the rest."""
    told = "\n".join(f"* {line}" for line in verdicts(result["rows"]))
    return (
        f"{_about(result)}\n\n{told}\n\nTable and curves: [docs/how-to/async.md](how-to/async.md)."
    )


def details(result: Row) -> str:
    """All that was measured."""
    told = "\n".join(f"* {line}" for line in verdicts(result["rows"]))
    return f"""{_about(result)} A gap is closed by 1 − (L − L_synchronous) / (L_stale −
L_synchronous), L being the mean loss on what was held out.

{told}

![Training loss by mini-batch](../pictures/{CURVES})

How far predicted weights are from those that came, in that run of the transformer:

![Error of predicted weights by updates ahead](../pictures/{ERRORS})

{_errors(result["prediction_errors"])}

{table(_HEAD, [_line(row) for row in result["rows"]])}"""


def verdicts(rows: list[Row]) -> Iterator[str]:
    """Each target, and where it is met."""
    for name in ("spectrain", "spectrain, discounted"):
        asked = [
            row
            for row in rows
            if row["subject"] in LANGUAGE
            and row["weights"] == name
            and row.get("gap_closed") is not None
        ]
        if asked:
            met = sum(row["gap_closed"] >= 0.5 for row in asked)
            each = "; ".join(f"{_of(row)} {row['gap_closed']:.0%}" for row in asked)
            yield (
                f"Half of the gap on the language models, `{name}`: met in {met} of"
                f" {len(asked)} ({each})."
            )
    for stages in sorted({row["stages"] for row in rows if row["weights"] not in PLAIN}):
        within, told = 0, []
        for plain in (row for row in rows if row["weights"] == "synchronous"):
            best = min(
                (r for r in rows if _same(r, plain, stages) and r["weights"] not in PLAIN),
                key=lambda r: float(r["held_out"]),
            )
            beyond = best["held_out"] - plain["held_out"]
            deviations = max(plain["spread"], 1e-12)
            within += beyond <= deviations
            told.append(
                f"{plain['subject']} {plain['optimizer']} {best['weights']}"
                f" {beyond / deviations:+.1f}"
            )
        yield (
            f"Best predictor at N = {stages} within a standard deviation of synchronous training:"
            f" {within} of {len(told)} (deviations above it: {'; '.join(told)})."
        )


def _about(result: Row) -> str:
    options = result["options"]
    discounted = any(row["weights"].endswith(", discounted") for row in result["rows"])
    return (
        f"A transformer and a residual LSTM on bytes of Python's standard library, a CNN on"
        f" scikit-learn's digits; {options['seeds']} seeds, {options['steps']} mini-batches, the"
        " learning rate that suits synchronous training. Runs that end worse than a uniform guess"
        " have diverged and count as one."
        + (" Discounts last for half of the run." if discounted else "")
    )


def _errors(errors: dict[str, dict[str, list[float]]]) -> str:
    """Whether predictions are nearer than stale weights, counted from the record."""
    told = []
    for optimizer, curves in errors.items():
        for how in ("linear", "decayed"):
            pairs = list(zip(curves[how], curves["stale"], strict=True))
            nearer = sum(error < stale for error, stale in pairs)
            told.append(f"{how} ones with {optimizer} at {nearer} of {len(pairs)} distances")
    return f"Predictions are nearer than the stale weights: {', '.join(told)}."


def _same(row: Row, plain: Row, stages: int) -> bool:
    mine = (row["subject"], row["optimizer"], row["stages"])
    return mine == (plain["subject"], plain["optimizer"], stages)


def _of(row: Row) -> str:
    return f"{row['subject']} {row['optimizer']} N = {row['stages']}"


_HEAD = ["", "N", "weights", "held-out loss", "gap closed", "accuracy", "diverged"]


def _line(row: Row) -> list[str]:
    closed = row.get("gap_closed")
    spread = row.get("accuracy_spread", 0.0)
    return [
        f"{row['subject']}, {row['optimizer']}",
        str(row["stages"]),
        row["weights"],
        f"{row['held_out']:.3f} ± {row['spread']:.3f}",
        f"{closed:.0%}" if closed is not None else "",
        f"{row['accuracy']:.3f} ± {spread:.3f}" if "accuracy" in row else "",
        str(row["diverged"] or ""),
    ]
