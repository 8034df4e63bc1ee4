"""The notebook runs from top to bottom, and shows a frontier and a plan where they end a cell."""

import ast
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebooks" / "frontier.ipynb"


def run(source, scope):
    """What a notebook shows below the cell: the value of its last line, if that is one."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        statements.append(last)
    exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), scope)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), scope)
    return None


@pytest.mark.slow
def test_the_notebook_shows_a_frontier_and_a_plan(capsys):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    scope = {}
    returned = {name: run(source, scope) for name, source in code.items()}
    front, plan = returned["frontier"], returned["plan"]
    circles = list(ET.fromstring(front._repr_html_()).iter("circle"))
    shown = front.all_settled()
    assert len(circles) == len(shown) + len(shown.baselines) > 10
    assert plan.peak_bytes <= 2 * 2**30
    assert "blocks.0" in ET.fromstring(plan._repr_html_()).find("pre").text
    free, bound = re.findall(r"^(.+): ([\d.]+) ms a step$", capsys.readouterr().out, re.M)
    assert bound[0] == "dp=8" and float(free[1]) <= float(bound[1])


def test_it_is_committed_without_output():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
