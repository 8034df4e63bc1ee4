"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Faults put into the code, and the tests that notice them"
_PLANTED = "planted"
_COLUMNS = "tried", "killed at first", "killed", "explained", "left"


def body(result: dict[str, Any]) -> str:
    """Counts by room, and the mutants that no test of their module notices."""
    rooms = {room: found for room, found in result["rooms"].items() if room != _PLANTED}
    every = {kind: sum(found[kind] for found in rooms.values()) for kind in _COLUMNS}
    rows = [[room, *(str(found[kind]) for kind in _COLUMNS)] for room, found in rooms.items()]
    rows.append(["in all", *(str(every[kind]) for kind in _COLUMNS)])
    if _PLANTED in result["rooms"]:
        made = result["rooms"][_PLANTED]
        rows.append(["made by hand", *(str(made[kind]) for kind in _COLUMNS)])
    noticeable = max(1, every["tried"] - every["explained"])
    first, share = every["killed at first"] / noticeable, every["killed"] / noticeable
    text = (
        "A mutant is one change of one module, by an operator of cosmic-ray at a position that a"
        " seed draws, equally many in each room. It is killed if a test of its module fails:"
        " of the file of tests of its path, of one that `tests/covered_by.txt` names, of one that"
        " imports it by name, or an example in its docstrings. A survivor is explained if no test"
        " could notice it; tests were written for others, so that more are killed than at first."
        " Those made by hand are faults of kinds that tests had missed."
        f"{_partial(every['tried'], result['drawn'])}"
        f" {share:.1%} of the mutants that can be noticed are killed, {first:.1%} at first; target:"
        " 92 %.\n\n" + table(["room", *_COLUMNS], rows)
    )
    survivors = [row for row in result["mutants"] if row["verdict"] != "killed"]
    lines = [
        f"* `{row['name']}`: {row['reason'] or row['verdict'] + ', and not explained yet'}"
        for row in survivors
    ]
    return text + ("\n\nSurvivors:\n\n" + "\n".join(lines) if lines else "")


def _partial(tried: int, drawn: int) -> str:
    """What a campaign that was not finished does not tell."""
    if tried == drawn:
        return ""
    return (
        f" Of {drawn} drawn, {tried} have been tried; for the others the share at first tells more."
    )
