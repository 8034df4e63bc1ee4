"""The floors of the house: imports point down only; rooms on one floor do not know each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardwright"

FLOORS = (  # ground floor first
    ("ir",),
    ("rules", "capture"),
    ("lower", "cost"),
    ("runtime", "search"),
    ("report", "train"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ROOF = ("cli", "api", "__init__", "__main__")  # may import every room, and each other

TORCH = ("torch", "transformers")  # transformers imports torch
KNOW_TORCH = ("capture", "lower", "runtime", "train", "api", "__init__")
MAX_LINES = 500


class Import(NamedTuple):
    line: int
    module: str
    deferred: bool  # inside a function or `if TYPE_CHECKING`, so not run by importing the file


def imports(node: ast.AST, deferred: bool = False) -> Iterator[Import]:
    """Every import below `node`; a relative one keeps its leading dots."""
    match node:
        case ast.Import(names=names):
            yield from (Import(node.lineno, alias.name, deferred) for alias in names)
        case ast.ImportFrom(module="shardwright", names=names, level=0):
            rooms = (f"shardwright.{alias.name}" for alias in names)
            yield from (Import(node.lineno, room, deferred) for room in rooms)
        case ast.ImportFrom(module=module, level=level):
            yield Import(node.lineno, "." * level + (module or ""), deferred)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            deferred = True
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            deferred = True
    for child in ast.iter_child_nodes(node):
        yield from imports(child, deferred)


def objection(room: str, imported: Import) -> str | None:
    """Why a file of `room` may not hold this import; None if it may."""
    top, _, rest = imported.module.partition(".")
    if top == "":
        return "is relative; write the full module name"
    if top in TORCH and room not in KNOW_TORCH:
        if room != "cli":
            return f"is torch, which {room} must not know"
        if not imported.deferred:
            return "is torch; import it in the function that needs it"
    if top == "shardwright" and room not in ROOF:
        target = rest.partition(".")[0]
        if target != room and FLOOR_OF.get(target, len(FLOORS)) >= FLOOR_OF[room]:
            return f"is not on a floor below {room}"
    elif room == "ir" and top not in sys.stdlib_module_names:
        return "is not in the standard library, and ir needs nothing else"
    return None


def objections(room: str, source: str) -> list[str]:
    return [
        f"line {imported.line}: {imported.module} {why}"
        for imported in imports(ast.parse(source))
        if (why := objection(room, imported))
    ]


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_lives_in_a_known_room():
    assert FILES
    homeless = [str(f.relative_to(ROOT)) for f in FILES if room_of(f) not in {*FLOOR_OF, *ROOF}]
    assert not homeless, "give each a floor in FLOORS, and in the design"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_down(file):
    assert objections(room_of(file), file.read_text()) == []


def test_importing_the_command_line_leaves_torch_alone():
    """`shardwright --help` answers at once, and torch takes seconds to import."""
    code = "import sys, shardwright.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


def test_no_file_is_longer_than_the_limit():
    folders = ("shardwright", "tests", "examples", "benchmarks", "docs", "scripts")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    lines = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert {f: n for f, n in lines.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize(
    "room, source",
    [
        ("ir", "import numpy"),
        ("ir", "from shardwright.rules import RULES"),
        ("rules", "from shardwright.capture import capture"),
        ("rules", "from shardwright import capture"),
        ("cost", "def f():\n    import torch.fx"),
        ("search", "from shardwright.runtime.ranks import start"),
        ("search", "import shardwright"),
        ("search", "import shardwright.api"),
        ("train", "if TYPE_CHECKING:\n    from shardwright.report import table"),
        ("runtime", "from . import send"),
        ("runtime", "from ..ir import Graph"),
        ("cli", "import torch"),
        ("cli", "try:\n    from torch import nn\nexcept ImportError:\n    pass"),
    ],
)
def test_what_breaks_the_house_is_found(room, source):
    assert len(objections(room, source)) == 1


@pytest.mark.parametrize(
    "room, source",
    [
        ("ir", "import json\nfrom shardwright.ir.mesh import Mesh"),
        ("rules", "from shardwright.ir import Mesh\nimport numpy as np"),
        ("lower", "import torch\nfrom shardwright import capture, ir, rules"),
        ("report", "from shardwright.solve.algebra.frontier import reduce"),
        ("cli", "def run():\n    import torch"),
        ("cli", "if TYPE_CHECKING:\n    import torch"),
        ("cli", "from shardwright import api\nfrom shardwright.report import table"),
    ],
)
def test_what_the_house_allows_is_left_alone(room, source):
    assert objections(room, source) == []
