"""Notebooks run from top to bottom, and show frontiers and plans where they end a cell."""

import ast
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def code_of(name):
    """The code of a notebook's cells, by their ids."""
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def run(source, scope):
    """What a notebook shows below the cell: the value of its last line, if that is one."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        statements.append(last)
    exec(compile(ast.Module(statements, []), "notebook", "exec"), scope)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "notebook", "eval"), scope)
    return None


@pytest.mark.slow
def test_the_notebook_shows_a_frontier_and_a_plan(capsys):
    scope = {}
    returned = {name: run(source, scope) for name, source in code_of("frontier.ipynb").items()}
    front, plan = returned["frontier"], returned["plan"]
    circles = list(ET.fromstring(front._repr_html_()).iter("circle"))
    shown = front.all_settled()
    assert len(circles) == len(shown) + len(shown.baselines) > 10
    assert plan.peak_bytes <= 2 * 2**30
    assert "blocks.0" in ET.fromstring(plan._repr_html_()).find("pre").text
    free, bound = re.findall(r"^(.+): ([\d.]+) ms a step$", capsys.readouterr().out, re.M)
    assert bound[0] == "dp=8"
    assert float(free[1]) <= 1.01 * float(bound[1])  # a uniform strategy is preferred


def test_each_choice_buys_memory(capsys):
    scope = {}
    for source in code_of("memory.ipynb").values():
        run(source, scope)
    text, plans = capsys.readouterr().out, scope["plans"]
    peaks = [plan.peak_bytes for plan in plans.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.5 * peaks[0]
    assert "layers recomputed        peaks in cross_entropy_loss, backward" in text
    curve = plans["parameters sharded"].memory.curve
    assert max(moment.saved for moment in curve) > 0 < max(moment.gathered for moment in curve)
    assert re.search(r"^s{30,}\.+ .*backward$", text, re.M)


@pytest.mark.parametrize("name", ["frontier.ipynb", "memory.ipynb"])
def test_it_is_committed_without_output(name):
    notebook = json.loads((NOTEBOOKS / name).read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
