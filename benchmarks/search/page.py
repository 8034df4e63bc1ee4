"""How the results of `run` are shown, of times and of distances to the optimum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.page import table

TITLE = "Search: time, and distance to the optimum"
OPTIMUM = Path(__file__).with_name("optimum.json")


def body(result: dict[str, Any]) -> str:
    """Wall seconds of every model and number of devices, beside what is aimed at."""
    one_mesh, every_mesh = [], []
    for name, row in result["rows"].items():
        times = {key: value["wall_seconds"] for key, value in row.items() if _is_time(value)}
        memory = f"{row['peak_resident_gib']:.2f}"
        if "meshes" in row:
            found = times["search of every mesh"]
            every_mesh.append([name, str(row["meshes"]), f"{found:.2f}", memory])
        else:
            searched = next(v for key, v in times.items() if key.startswith("search "))
            one_mesh.append(
                [name, str(row["operators"]), f"{times['capture']:.2f}", f"{searched:.3f}", memory]
            )
    aims = [[aim["what"], f"{aim['measured']:g}", f"{aim['at_most']:g}"] for aim in result["aims"]]
    parts = [f"Planned for {result['machine planned for']}, medians."]
    if one_mesh:
        head = ["model, on the mesh 8 x 8", "operators", "s to capture", "s to search", "GiB"]
        parts.append(table(head, one_mesh))
    if every_mesh:
        parts.append(table(["every mesh", "meshes", "s to search", "GiB"], every_mesh))
    if aims:
        parts += ["Beside what is aimed at:", table(["what", "measured", "at most"], aims)]
    if OPTIMUM.exists():
        parts.append(distances(json.loads(OPTIMUM.read_text())))
    return "\n\n".join(parts)


def distances(result: dict[str, Any]) -> str:
    """How far frontier and bound are from the optimum, at the worst of ten memory limits."""
    rows = [
        [
            name,
            f"{row['most_above_optimum']:.3%}",
            f"{row['bound_most_below_optimum']:.3%}",
            f"{row['search_processor_seconds']:.2f}",
            f"{row['program_processor_seconds']:.1f}",
        ]
        for name, row in result["rows"].items()
    ]
    head = ["model, machine, mesh", "frontier above", "bound below", "s", "s of the program"]
    return (
        "Against an integer program (HiGHS), at the worst of ten memory limits"
        f" (`{result['command']}`, {result['date']}, at commit {result['commit'][:7]}):\n\n"
        + table(head, rows)
    )


def _is_time(value: object) -> bool:
    return isinstance(value, dict) and "wall_seconds" in value
