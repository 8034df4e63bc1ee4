"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "TAPAS: search time against depth and width"


def body(result: dict[str, Any]) -> str:
    """Processor seconds by depth, by width, and of an integer program."""
    depths = [
        [
            str(row["layers"]),
            str(row["operators"]),
            _s(row["folded_seconds"]),
            _s(row["unfolded_seconds"]),
        ]
        for row in result["depths"]
    ]
    widths = [[str(row["width"]), _s(row["folded_seconds"])] for row in result["widths"]]
    programs = [
        [
            str(row["layers"]),
            _s(row["frontier_seconds"]),
            _s(row["program_seconds"]),
            f"{row['above_optimum']:.2%}",
        ]
        for row in result["programs"]
    ]
    parts = [
        f"Llama on {result['machine planned for']}, processor seconds. By number of layers:",
        table(
            ["layers", "operators", "whole search, folded", "tables and sweep, unfolded"], depths
        ),
        "A whole frontier, unfolded, against one point of it by an integer program (HiGHS), on"
        " one axis of 8:",
        table(["layers", "frontier", "program", "frontier's point above the optimum"], programs),
    ]
    if widths:
        parts += ["By width, four layers:", table(["width", "whole search, folded"], widths)]
    return "\n\n".join([*parts, *_rival(result["autoparallel"])])


def _rival(found: dict[str, Any]) -> list[str]:
    if not found["installed"]:
        return ["meta-pytorch/autoparallel was not installed, and is not compared with."]
    rows = []
    for row in found["rows"]:
        theirs, ours = row["theirs"], row["ours"]
        took = (
            [theirs["failed"], ""]
            if "failed" in theirs
            else [_s(theirs["capture_seconds"]), _s(theirs["search_seconds"])]
        )
        rows.append(
            [str(row["layers"]), *took, _s(ours["capture_seconds"]), _s(ours["search_seconds"])]
        )
    head = [
        "layers",
        "autoparallel: capture and cost tables",
        "its integer program",
        "ours: capture",
        "ours: search",
    ]
    return [
        "meta-pytorch/autoparallel on the same network and mesh, for one memory limit; ours is the"
        " whole frontier. Attention is written out for both, as it has no strategy for the CPU's"
        " fused attention with a mask:",
        table(head, rows),
    ]


def _s(seconds: float) -> str:
    return f"{seconds:.2f}"
