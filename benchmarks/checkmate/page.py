"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

_ROUNDING = 1e-9
TITLE = "Recomputation against Checkmate's optimum"


def body(result: dict[str, Any]) -> str:
    """The time above the optimum at every limit of every model."""
    lines, told = [], []
    for name, model in result["models"].items():
        above = [row["ours"]["seconds"] / row["bound"] - 1 for row in model["rows"]]
        for row, more in zip(model["rows"], above, strict=True):
            planned = row["planned"]
            lines.append(
                [
                    name,
                    f"{row['limit'] / 2**20:.0f}",
                    f"{1e3 * row['ours']['seconds']:.2f}",
                    f"{1e3 * row['bound']:.2f}{'' if row['optimal'] else ' at least'}",
                    f"{100 * abs(more):.2f} %",
                    f"{100 * abs(row['end_once'] / row['bound'] - 1):.2f} %",
                    f"{1e3 * planned['printed_bound']:.2f}",
                    f"{1e3 * planned['bound_within_its_bytes']:.2f}",
                ]
            )
        proven = sum(row["optimal"] for row in model["rows"])
        over = [_over(row["planned"]) for row in model["rows"]]
        told.append(
            f"* {name}: {model['operators']} operators are {model['nodes']} nodes,"
            f" {model['forward_nodes']} of them of the forward pass; {model['plans']} plans; at"
            f" most {100 * max(above):.2f} % above the optimum, which is proven at {proven} of"
            f" {len(model['rows'])} limits; {_validity(over)}.{_paper(model['rows'])}"
        )
    head = ["model", "MiB", "ours, ms", "Checkmate, ms", "above", "above, end once"]
    head += ["printed bound", "optimum there"]
    what = (
        f"GPT-2 of five layers, 8 sequences of 1024, one device of {result['planned for']}. Seconds"
        " and bytes are those of one model for both: Checkmate's training graph and memory, with"
        " our prices, without the update. MiB are activations and gradients of activations. Aimed"
        " at: 0.5 % at every limit, as published. A bound is printed for the memory of the plan"
        " itself, and compared with Checkmate's optimum there. `end once`: the same schedules,"
        " whose last nodes that run again run once instead, as many of them as is best."
    )
    return f"{what}\n\n{table(head, lines)}\n\n" + "\n".join(told)


def _over(planned: dict[str, Any]) -> float:
    """The part by which a printed bound is above Checkmate's optimum; rounding is none."""
    more = float(planned["printed_bound"] / planned["bound_within_its_bytes"] - 1)
    return more if more > _ROUNDING else 0.0


def _validity(over: list[float]) -> str:
    """How many printed bounds hold for Checkmate's schedules, and how far the others are off."""
    valid = sum(more == 0 for more in over)
    most = f" (the others by up to {100 * max(over):.3f} %)" if valid < len(over) else ""
    return f"{valid} of {len(over)} printed bounds are not above Checkmate's optimum{most}"


def _paper(rows: list[dict[str, Any]]) -> str:
    """What HiGHS makes of the paper's own program."""
    found = [row for row in rows if "paper" in row]
    if not found:
        return ""
    below = max(1 - row["paper"]["bound"] / row["bound"] for row in found)
    proven = sum(row["paper"]["proven"] for row in found)
    return (
        f" Of the paper's own program HiGHS solves {proven} of {len(found)} in"
        f" {found[0]['paper']['minutes']:g} min each; its bounds are up to {100 * below:.1f} %"
        " below the optimum."
    )
