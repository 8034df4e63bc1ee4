"""Pictures of the accuracy benchmark: learning curves, and errors of predicted weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from benchmarks.record import digest

SMOOTHED = 8  # steps a point of a curve is the mean of
# The decayed predictors differ little from the linear ones; the table has them.
SHOWN = ("synchronous", "stale", "stash", "spectrain", "pipeoptim", "spectrain, discounted")
CURVES, ERRORS = "async-curves.svg", "async-prediction.svg"


def draw(result: dict[str, Any], folder: Path) -> None:
    """`CURVES` and `ERRORS` in `folder`, each naming what it is drawn from."""
    matplotlib.rcParams["svg.hashsalt"] = "shardwright"  # equal results, equal files
    matplotlib.rcParams["svg.fonttype"] = "none"
    _save(_curves(result["rows"]), folder / CURVES, result["rows"])
    _save(_errors(result["prediction_errors"]), folder / ERRORS, result["prediction_errors"])


def _curves(rows: list[dict[str, Any]]) -> Any:
    pipelines = sorted({row["stages"] for row in rows if row["weights"] != "synchronous"})
    columns = [(o, n) for o in dict.fromkeys(row["optimizer"] for row in rows) for n in pipelines]
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    figure, axes = pyplot.subplots(
        len(subjects), len(columns), figsize=(3.4 * len(columns), 2.5 * len(subjects)),
        squeeze=False, sharey="row",
    )  # fmt: skip
    for line, subject in zip(axes, subjects, strict=True):
        for ax, (optimizer, stages) in zip(line, columns, strict=True):
            for row in rows:
                here = (row["subject"], row["optimizer"]) == (subject, optimizer)
                alone = row["weights"] == "synchronous"
                if here and row["weights"] in SHOWN and (alone or row["stages"] == stages):
                    color = f"C{SHOWN.index(row['weights'])}"
                    points = _smooth(row["curve"])
                    ax.plot(*points, label=row["weights"], color=color, lw=2 if alone else 1.2)
            ax.set_title(f"{subject}, {optimizer}, {stages} stages", fontsize=9)
        line[0].set_ylabel("training loss")
    for ax in axes[-1]:
        ax.set_xlabel("mini-batch")
    axes[0][-1].legend(fontsize=8)
    return figure


def _errors(errors: dict[str, dict[str, list[float]]]) -> Any:
    figure, axes = pyplot.subplots(1, len(errors), figsize=(4 * len(errors), 3), squeeze=False)
    for ax, (optimizer, curves) in zip(axes[0], errors.items(), strict=True):
        for how, values in curves.items():
            label = {"stale": "stale ‖W − W′‖"}.get(how, f"{how} ‖Ŵ − W′‖")
            ax.plot(range(1, len(values) + 1), values, marker="o", ms=3, label=label)
        ax.set_title(f"transformer, {optimizer}", fontsize=9)
        ax.set_xlabel("s, updates ahead")
    axes[0][0].set_ylabel("mean distance from the weights to come")
    axes[0][0].legend(fontsize=8)
    return figure


def _smooth(curve: list[float]) -> tuple[list[float], list[float]]:
    """Midpoints of windows of steps, and the mean loss in each."""
    starts = range(0, len(curve) - SMOOTHED + 1, SMOOTHED)
    means = [sum(curve[i : i + SMOOTHED]) / SMOOTHED for i in starts]
    return [i + SMOOTHED / 2 for i in starts], means


def _save(figure: Any, path: Path, drawn: Any) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Description": digest(drawn)})
    pyplot.close(figure)
