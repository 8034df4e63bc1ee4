"""Data of the pictures in docs/explanation/concepts.md: plans of its example, tiles, results."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright.ir.layout import Layout, Mesh, Partial, atom_range
from shardwright.rules.analysis import analyze
from shardwright.rules.rule import Dims, Rule, Split, Tiling

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "concepts.md"
BENCHMARKS = ROOT / "benchmarks"
MESH = Mesh.parse("dp=2 tp=2")
LAYER = 4, 6, 4  # samples, features of the input, features of the result
_EXAMPLE = re.compile(r"```python\n(.*?)```\n\n<!-- output -->\n\n```text\n(.*?)\n```\n", re.S)
_DEPTH = re.compile(r"llama-8b, (\d+) layers")


def example() -> tuple[str, str]:
    """Code and output of the page's example; a test runs it and compares."""
    found = _EXAMPLE.search(PAGE.read_text())
    if found is None:
        raise ValueError("the page has no example that shows its output")
    return found[1], found[2]


def frontier() -> sw.Frontier:
    """The frontier of the page's example, which is run for it.

    Raises `ValueError` where the page shows another.
    """
    code, shown = example()
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), names)
    if printed.getvalue().rstrip() != shown:
        raise ValueError(
            "the page shows other plans than its example finds; first run"
            " UPDATE_GOLDEN=1 python -m pytest tests/docs/test_readme_output.py"
        )
    front: sw.Frontier = names["front"]
    return front


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a matrix that a device holds, from a row and column up to others.

    `partial` says that it is a term of a sum over devices.
    """

    top: int
    left: int
    bottom: int
    right: int
    partial: bool


@dataclass(frozen=True, slots=True)
class Tiled:
    """A linear layer x Wᵀ = y under one tiling: layouts and, by device, tiles of x, Wᵀ and y."""

    title: str
    layouts: tuple[str, str, str]
    devices: tuple[tuple[Tile, Tile, Tile], ...]


def tilings() -> list[Tiled]:
    """Three tilings of a linear layer, as its rule and the layouts' tiles have them."""
    samples, features, made = LAYER
    graph = sw.capture(nn.Linear(features, made, bias=False), (torch.zeros(samples, features),))
    (op,) = graph.ops
    rule = analyze(graph).rules[op.name]
    (batch,), (summed,) = rule.operands[0]
    (_, (column,)) = rule.results[0]
    return [
        _tiled("both axes split the batch", rule, (Split(batch), Split(batch))),
        _tiled("dp splits the batch, tp the columns of Wᵀ", rule, (Split(batch), Split(column))),
        _tiled("dp splits the batch, tp the rows of Wᵀ", rule, (Split(batch), Split(summed))),
    ]


def _tiled(title: str, rule: Rule, tiling: Tiling) -> Tiled:
    placed = [rule.axis_placements(choice) for choice in tiling]
    values = [
        (rule.operands[0], Layout(MESH, tuple(axis.operands[0] for axis in placed))),
        (rule.operands[1], Layout(MESH, tuple(axis.operands[1] for axis in placed))),
        (rule.results[0], Layout(MESH, tuple(axis.results[0] for axis in placed))),
    ]
    devices = []
    for rank in range(MESH.size):
        x, weight, y = (_tile(rule, dims, layout, rank) for dims, layout in values)
        transposed = Tile(weight.left, weight.top, weight.right, weight.bottom, weight.partial)
        devices.append((x, transposed, y))
    x_layout, weight_layout, y_layout = (str(layout) for _, layout in values)
    return Tiled(title, (x_layout, weight_layout, y_layout), tuple(devices))


def _tile(rule: Rule, dims: Dims, layout: Layout, rank: int) -> Tile:
    coordinate = MESH.coordinate(rank)
    rows, columns = (
        atom_range(size, (dim, 0), layout, coordinate)
        for dim, (size,) in enumerate(rule.atoms(dims))
    )
    partial = any(isinstance(p, Partial) for p in layout.placements)
    return Tile(rows.start, columns.start, rows.stop, columns.stop, partial)


def folding() -> dict[str, list[tuple[int, float]]]:
    """Seconds of a search by number of layers, of benchmarks/search: all of it, nothing folded."""
    found: dict[str, list[tuple[int, float]]] = {"repeats folded": [], "nothing folded": []}
    for name, row in _result("search")["rows"].items():
        depth = _DEPTH.fullmatch(name)
        for series, key in zip(
            found, ("search dp=8 tp=8", "search dp=8 tp=8, nothing folded"), strict=True
        ):
            if depth and key in row:
                found[series].append((int(depth[1]), row[key]["wall_seconds"]))
    return found


def predictions() -> list[tuple[str, str, str, float, float]]:
    """Place, model, plan, predicted and measured seconds of a step, of benchmarks/estimates."""
    fields = ("place", "model", "plan", "predicted_seconds", "measured_seconds")
    return [tuple(row[field] for field in fields) for row in _result("estimates")["rows"]]


SHOWN: dict[str, Callable[[], Any]] = {
    "frontier": lambda: example()[1],
    "tilings": lambda: [asdict(tiled) for tiled in tilings()],
    "folding": folding,
    "prediction": predictions,
}  # what each picture is made of, as JSON has it


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCHMARKS / name / "result.json").read_text())
    return found
