"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Pipelines against one device"


def body(result: dict[str, Any]) -> str:
    """The worst error of each model under each schedule, over all meshes."""
    rows = result["rows"]
    schedules = list(dict.fromkeys(_schedule(row) for row in rows))
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        line = [model]
        for schedule in schedules:
            mine = [r for r in rows if (r["model"], _schedule(r)) == (model, schedule)]
            line.append(f"{max(r['worst'] for r in mine):.0e} ({len(mine)})" if mine else "")
        lines.append(line)
    meshes = ", ".join(dict.fromkeys(f"`{row['mesh']}`" for row in rows))
    return (
        "Two steps of each pipeline on local ranks in float64, every operator with a tiling and"
        " every parameter with a layout drawn at random: the largest difference of a loss, gradient"
        f" or buffer from one device's, and on how many meshes (of {meshes}). A model in pieces has"
        " batch norms over each micro-batch; others with batch norms take the batch in one. Asked:"
        " 1e-9."
        f"\n\n{table(['', *schedules], lines)}"
    )


def _schedule(row: dict[str, Any]) -> str:
    return f"{row['schedule']} x {row['each']}" if row["each"] > 1 else str(row["schedule"])
