"""Draws the pictures of docs/explanation/concepts.md: frontier, tilings, folding, prediction.

    python -m scripts.explanation_pictures                     # all, which takes a minute
    python -m scripts.explanation_pictures folding prediction

Each picture holds a hash of what it shows, which a test compares with what there is to show.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import Bbox

from benchmarks.record import digest
from scripts import explained
from scripts.explained import Tile
from shardwright.ir.frontier import parse_bytes
from shardwright.ir.plan import Plan

FOLDER = explained.ROOT / "docs" / "pictures"
LIMIT = "24GiB"  # the limit in the picture
BAND = 0.25  # the largest error asked of a predicted step
INK, QUIET, LINE = "#1b1f24", "#57606a", "#d0d7de"
BLUE, PURPLE, OCHRE, RED = "#0b6bcb", "#a3278f", "#8a5a00", "#b42318"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shardwright",  # equal pictures, equal files
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
}
Point = tuple[float, float]
Align = Literal["left", "center", "right"]
Level = Literal["top", "center", "bottom"]


def frontier() -> Figure:
    """Plans of the page's example: time against memory, baselines by name, a limit."""
    front = explained.frontier()
    figure, ax = pyplot.subplots(figsize=(7.6, 4.4))
    found = [(plan.peak_bytes / 2**30, plan.step_seconds * 1e3) for plan in front]
    shown = _distinct(front.baselines)
    known = [(plan.peak_bytes / 2**30, plan.step_seconds * 1e3) for plan in shown]
    ax.plot(*zip(*found, strict=True), "o-", color=BLUE, ms=5, lw=1, label="frontier")
    ax.plot(*zip(*known, strict=True), "D", color=OCHRE, ms=6, label="well-known plans")
    limit = parse_bytes(LIMIT) / 2**30
    ax.axvline(limit, color=RED, ls="--", lw=1.2, label=f"memory limit, {LIMIT}")
    ax.set_xlim(0, max(x for x, _ in found + known) * 1.1)
    ax.margins(y=0.2)  # room for names below the frontier
    ax.set(xlabel="memory, GiB per GPU", ylabel="time, ms per step")
    ax.legend(loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0))
    figure.tight_layout()
    _name(ax, known, [plan.name for plan in shown], found, limit)
    return figure


def tilings() -> Figure:
    """What each of four devices holds of x, Wᵀ and y under three tilings of a linear layer."""
    shown = explained.tilings()
    samples, features, made = explained.LAYER
    shapes = (samples, features), (features, made), (samples, made)
    figure, axes = pyplot.subplots(len(shown), explained.MESH.size, figsize=(9.6, 5.2))
    for place, (line, tiled) in enumerate(zip(axes, shown, strict=True)):
        for rank, (ax, tiles) in enumerate(zip(line, tiled.devices, strict=True)):
            middles = _matrices(ax, tiles, shapes)
            if rank == 0:
                for name, middle in zip(("x", "Wᵀ", "y"), middles, strict=True):
                    ax.text(middle, -0.5, name, ha="center", color=QUIET)
            if place == 0:
                dp, tp = explained.MESH.coordinate(rank)
                name = f"device {rank}, at dp {dp}, tp {tp}"
                ax.text(middles[1], -4.6, name, ha="center", weight="bold")
        x, weight, y = tiled.layouts
        line[0].text(0, -2.8, tiled.title, weight="bold")
        line[0].text(0, -1.7, f"x is {x}; W is {weight}; y is {y}", family="monospace", size=8)
    note = "filled: what a device holds; hatched: its term of a sum over tp"
    figure.text(0.0225, 0.03, note, color=QUIET)
    figure.subplots_adjust(left=0.02, right=0.99, top=0.83, bottom=0.02, wspace=0.1, hspace=0.4)
    return figure


def folding() -> Figure:
    """Seconds of a search by the number of layers, beside growth in proportion to them."""
    shown = explained.folding()
    figure, ax = pyplot.subplots(figsize=(5.6, 3.6))
    depths = [depth for depth, _ in shown["repeats folded"]]
    for (name, points), color, mark in zip(shown.items(), (BLUE, OCHRE), "oD", strict=True):
        ax.plot(*zip(*points, strict=True), f"{mark}-", color=color, ms=6, label=name)
    layers, seconds = shown["nothing folded"][-1]
    growth = [seconds * depth / layers for depth in depths]
    ax.plot(depths, growth, ":", color=QUIET, lw=1.2, label="growth in proportion to layers")
    _logarithmic(ax, depths, (0.1, 0.2, 0.5, 1, 2, 5, 10))
    ax.set(xlabel="layers of Llama", ylabel="search, seconds")
    ax.legend(loc="upper left")
    figure.tight_layout()
    return figure


def prediction() -> Figure:
    """Predicted step times against measured ones, the line of equality and a band around it."""
    shown = explained.predictions()
    figure, ax = pyplot.subplots(figsize=(5.6, 5.0))
    times = [seconds for row in shown for seconds in row[3:]]
    ends = [min(times) / 1.15, max(times) * 1.15]
    ax.plot(ends, ends, color=QUIET, lw=1, label="as predicted")
    low, high = ([part * end for end in ends] for part in (1 - BAND, 1 + BAND))
    ax.fill_between(ends, low, high, color=LINE, alpha=0.5, lw=0, label=f"± {BAND:.0%}")
    plans = dict(zip(dict.fromkeys(row[2] for row in shown), "oDs^", strict=True))
    places = dict(zip(dict.fromkeys(row[0] for row in shown), (BLUE, PURPLE), strict=True))
    for place, _, plan, predicted, measured in shown:
        ax.plot(predicted, measured, plans[plan], color=places[place], ms=5, alpha=0.8)
    for plan, mark in plans.items():
        ax.plot([], [], mark, color=QUIET, label=f"{plan} plan")
    for place, color in places.items():
        ax.plot([], [], "s", color=color, ms=9, label=f"on {place}")
    _logarithmic(ax, (0.2, 0.5, 1, 2), (0.2, 0.5, 1, 2))
    ax.set(xlabel="predicted, seconds per step", ylabel="measured, seconds per step")
    ax.set(xlim=ends, ylim=ends, aspect="equal")
    ax.legend(loc="upper left")
    figure.tight_layout()
    return figure


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    """The plans without those whose point is that of one before, within a percent."""
    found: list[Plan] = []
    for plan in plans:
        same = (
            math.isclose(plan.step_seconds, one.step_seconds, rel_tol=0.01)
            and math.isclose(plan.peak_bytes, one.peak_bytes, rel_tol=0.01)
            for one in found
        )
        if not any(same):
            found.append(plan)
    return found


def _name(
    ax: Axes, points: list[Point], names: list[str], others: list[Point], limit: float
) -> None:
    """Each point's name beside it, where it covers no point, no other name and not the limit."""
    ax.figure.canvas.draw()
    frame = ax.get_window_extent()
    x = ax.transData.transform((limit, 0))[0]
    taken = [Bbox.from_bounds(x - 2, frame.y0, 4, frame.height)]
    for at in points + others:
        x, y = ax.transData.transform(at)
        taken.append(Bbox.from_bounds(x - 5, y - 5, 10, 10))
    for at, name in zip(points, names, strict=True):
        for reach, align, level in _around():
            words = ax.annotate(
                name, at, reach, textcoords="offset points", ha=align, va=level,
                fontsize=8, color=OCHRE, bbox={"fc": "white", "ec": "none", "pad": 1},
            )  # fmt: skip
            box = words.get_window_extent().padded(1)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0
            if inside and box.y1 <= frame.y1 and not box.count_overlaps(taken):
                break
            words.remove()
        else:
            raise ValueError(f"there is no room for the name of {name!r}")
        taken.append(box)
        line = {"arrowstyle": "-", "color": OCHRE, "lw": 0.5}
        ax.annotate("", at, reach, textcoords="offset points", arrowprops=line)


def _around() -> Iterator[tuple[Point, Align, Level]]:
    """Places for words around a point, nearest first, and how they stand there."""
    for away in range(0, 238, 7):
        yield (8, away), "left", "center"
        yield (8, -away), "left", "center"
        yield (-8, away), "right", "center"
        yield (-8, -away), "right", "center"
        yield (0, away + 8), "center", "bottom"
        yield (0, -away - 8), "center", "top"


def _matrices(ax: Axes, tiles: Sequence[Tile], shapes: Sequence[tuple[int, int]]) -> list[float]:
    """Matrices side by side, the tile that a device holds filled, a term of a sum hatched.

    Returns where the middles of the matrices are.
    """
    left, middles = 0.0, []
    for tile, (rows, columns), sign in zip(tiles, shapes, ("", "·", "="), strict=True):
        if sign:
            ax.text(left + 0.6, shapes[0][0] / 2, sign, ha="center", va="center", size=11)
            left += 1.2
        ax.add_patch(Rectangle((left, 0), columns, rows, fc="#f5f6f8", ec=LINE, lw=0.8))
        at, width, height = (
            (left + tile.left, tile.top), tile.right - tile.left, tile.bottom - tile.top
        )  # fmt: skip
        fill, hatch = ("white", "////") if tile.partial else (BLUE, "")
        ax.add_patch(Rectangle(at, width, height, fc=fill, ec=BLUE, lw=1, hatch=hatch))
        middles.append(left + columns / 2)
        left += columns
    ax.set(xlim=(-0.2, left + 0.2), ylim=(max(rows for rows, _ in shapes) + 0.2, -0.2))
    ax.set_aspect("equal", anchor="NW")
    ax.set_axis_off()
    return middles


def _logarithmic(ax: Axes, xs: Iterable[float], ys: Iterable[float]) -> None:
    """Both axes logarithmic, with these ticks."""
    ax.set(xscale="log", yscale="log")
    for axis, ticks in ((ax.xaxis, xs), (ax.yaxis, ys)):
        axis.set_major_locator(FixedLocator(list(ticks)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


PICTURES = {draw.__name__: draw for draw in (frontier, tilings, folding, prediction)}


def save(name: str, folder: Path) -> None:
    """Draw the picture `name` into `folder`."""
    with matplotlib.rc_context(STYLE):
        figure = PICTURES[name]()
        description = digest(explained.SHOWN[name]())
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Description": description})
        pyplot.close(figure)


def main() -> int:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME")
    for name in parser.parse_args().names or PICTURES:
        save(name, FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
