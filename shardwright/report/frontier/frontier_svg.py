"""Draws a frontier as a small SVG picture for notebooks.

The interactive page is in `page`.
"""

from __future__ import annotations

from html import escape

from shardwright.ir.frontier import Frontier

WIDTH, HEIGHT, MARGIN = 560, 260, 50


def frontier_html(frontier: Frontier) -> str:
    """A frontier in a notebook: a picture of time against memory, and a list of plans to expand."""
    frontier = frontier.all_settled()
    rows = "".join(
        f"<tr><td>{mark}</td><td>{escape(str(plan))}</td></tr>"
        for mark, plan in [
            *((str(index), plan) for index, plan in enumerate(frontier)),
            *(("baseline", plan) for plan in frontier.baselines),
        ]
    )
    count = f"{len(frontier)} plans, fastest first, and {len(frontier.baselines)} baselines"
    listed = f"<details><summary>{count}</summary><table>{rows}</table></details>"
    return f"<div>{picture(frontier)}{listed}</div>"


def picture(frontier: Frontier) -> str:
    """Step time over memory per rank: plans joined by a line, baselines hollow."""
    found = [(*costs, f"plan {index}") for index, costs in enumerate(frontier.costs)]
    known = [(b.step_seconds, b.peak_bytes, b.name) for b in frontier.baselines]
    times, sizes = zip(*((p[0], p[1]) for p in (*found, *known)), strict=True)

    def at(seconds: float, size: float) -> tuple[float, float]:
        x = _share(size, min(sizes), max(sizes)) * (WIDTH - 2 * MARGIN) + MARGIN
        y = _share(seconds, max(times), min(times)) * (HEIGHT - 2 * MARGIN) + MARGIN
        return round(x, 1), round(y, 1)

    line = " ".join("{},{}".format(*at(p[0], p[1])) for p in found)
    dots = "".join(_dot(*at(p[0], p[1]), _words(*p), hollow=False) for p in found)
    dots += "".join(_dot(*at(p[0], p[1]), _words(*p), hollow=True) for p in known)
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    ends = (
        _label(MARGIN, HEIGHT - 18, "start", f"{min(sizes) / 2**30:.4g} GiB"),
        _label(WIDTH - MARGIN, HEIGHT - 18, "end", f"{max(sizes) / 2**30:.4g} GiB a rank"),
        _label(4, MARGIN - 14, "start", f"{max(times) * 1e3:.4g} ms a step"),
        _label(4, HEIGHT - MARGIN + 14, "start", f"{min(times) * 1e3:.4g} ms"),
    )
    return (
        f'<svg {frame} role="img" aria-label="Step time over memory per rank" color="currentColor">'
        f'<polyline points="{line}" fill="none" stroke="#888" stroke-dasharray="3"/>'
        f"{dots}{''.join(ends)}</svg>"
    )


def _share(value: float, first: float, last: float) -> float:
    """0 at `first`, 1 at `last`; the middle where they are equal."""
    return (value - first) / (last - first) if last != first else 0.5


def _words(seconds: float, size: float, name: str) -> str:
    return f"{name}: {seconds * 1e3:.4g} ms, {size / 2**30:.4g} GiB"


def _dot(x: float, y: float, words: str, *, hollow: bool) -> str:
    style = 'fill="none" stroke="#a3278f"' if hollow else 'fill="#0b6bcb"'
    return f'<circle cx="{x}" cy="{y}" r="5" {style}><title>{escape(words)}</title></circle>'


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="12" fill="currentColor">'
        f"{text}</text>"
    )
