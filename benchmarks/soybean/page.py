"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "SoyBean: steps on hosts with slow links"
_HEAD = """Our plan against the usual ones on hosts of one machine (`benchmarks/hosts`), which
share its cores. Two such cores do about 1/3000 of an H100's arithmetic: 0.1 Gbit/s here stands for
400 Gbit/s InfiniBand there, 1 Gbit/s for NVLink. Networks have the stated part of their published
widths. Figures are a rival's step time over ours: medians (quartiles)."""


def body(result: dict[str, Any]) -> str:
    """Ratios by network, hosts and link."""
    rivals = list(result["rows"][0]["ratios"])
    rows = []
    for row in result["rows"]:
        name = f"{row['model']} x {row['scale']:g}, batch {row['batch']}"
        ratios = [
            f"{middle:.2f} ({low:.2f} to {high:.2f})"
            for low, middle, high in (row["ratios"][rival] for rival in rivals)
        ]
        ours = f"{row['seconds']['ours'] * 1e3:.0f}"
        link = f"{row['bit_per_s'] / 1e9:g}"
        rows.append([name, str(row["hosts"]), link, ours, *ratios])
    return f"{_HEAD}\n\n{table(['', 'hosts', 'Gbit/s', 'ours, ms', *rivals], rows)}"
