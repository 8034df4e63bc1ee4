"""Pictures of the accuracy benchmark: learning curves, and errors of predicted weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

SMOOTHED = 8  # steps a point of a curve is the mean of
# The decayed predictors differ little from the linear ones; the table has them.
SHOWN = ("synchronous", "stale", "stash", "spectrain", "pipeoptim")


def draw(result: dict[str, Any], folder: Path) -> None:
    """`curves.svg` and `prediction.svg` in `folder`."""
    matplotlib.rcParams["svg.hashsalt"] = "shardwright"  # equal results, equal files
    _curves(result["rows"], folder / "curves.svg")
    _errors(result["prediction_errors"], folder / "prediction.svg")


def _curves(rows: list[dict[str, Any]], path: Path) -> None:
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
    _save(figure, path)


def _errors(errors: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(errors), figsize=(4 * len(errors), 3), squeeze=False)
    for ax, (optimizer, curves) in zip(axes[0], errors.items(), strict=True):
        for how, values in curves.items():
            label = {"stale": "stale ‖W − W′‖"}.get(how, f"{how} ‖Ŵ − W′‖")
            ax.plot(range(1, len(values) + 1), values, marker="o", ms=3, label=label)
        ax.set_title(f"transformer, {optimizer}", fontsize=9)
        ax.set_xlabel("s, updates ahead")
    axes[0][0].set_ylabel("mean distance from the weights to come")
    axes[0][0].legend(fontsize=8)
    _save(figure, path)


def _smooth(curve: list[float]) -> tuple[list[float], list[float]]:
    """Midpoints of windows of steps, and the mean loss in each."""
    starts = range(0, len(curve) - SMOOTHED + 1, SMOOTHED)
    means = [sum(curve[i : i + SMOOTHED]) / SMOOTHED for i in starts]
    return [i + SMOOTHED / 2 for i in starts], means


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
