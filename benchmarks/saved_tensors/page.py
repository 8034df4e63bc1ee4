"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

TITLE = "States of saved tensors against a mixed-integer program"


def body(result: dict[str, Any]) -> str:
    """The largest errors over all graphs."""
    rows = result["rows"]
    error, search, bound = (max(row[name] for row in rows) for name in ("error", "search", "bound"))
    moved = sum(row["moved"] for row in rows)
    operators = [row["operators"] for row in rows]
    states = [row["states"] for row in rows]
    return (
        f"{len(rows)} random graphs of {min(operators)} to {max(operators)} operators on one"
        f" device, with {min(states)} to {max(states)} decisions: layers are kept or recomputed,"
        " their products run again or once, and their inputs wait on the device or on the host"
        f" ({moved} frontiers have inputs there). Against HiGHS, whose program has costs of its"
        f" own derivation, the exact frontier is off by {error:.0e} at most, the plans of the"
        f" default search take {100 * search:.2f} % longer at most, and no lower bound is above"
        f" the optimum by more than {bound:.0e}."
    )
