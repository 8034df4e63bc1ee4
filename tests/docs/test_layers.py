"""The layers of the package: imports point down only, and no two files import each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardwright"

LAYERS = (  # the lowest first; packages of one layer do not import each other
    ("ir", "solve"),
    ("frameworks", "machine", "plan_io", "rules"),
    ("program",),
    ("simulate", "tracing"),
    ("planner", "runtime"),
    ("profile", "train", "report"),
)
# The planner is handed what only torch knows: the memory of single operator calls.
NEVER = {("planner", "tracing")}
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
TOP = (
    "cli",
    "integrations",
    "api",
    "public",
    "__init__",
    "__main__",
)  # may import every package, and each other

TORCH = ("torch", "transformers")  # transformers imports torch
KNOW_TORCH = (
    "tracing", "runtime", "profile", "train", "integrations", "api", "__init__",
)  # fmt: skip
MAX_LINES = 500
MAX_FILES = 16
# Each imports no torch, not through others either.
WITHOUT_TORCH = (
    "ir", "solve", "machine", "plan_io", "rules", "program", "simulate", "planner",
    "report", "cli", "public", "frameworks",
)  # fmt: skip


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


def objection(package: str, imported: Import) -> str | None:
    """Why a file of `package` may not hold this import; None if it may."""
    top, _, rest = imported.module.partition(".")
    if top == "":
        return "is relative; write the full module name"
    if top in TORCH and package not in KNOW_TORCH:
        if package != "cli":
            return f"is torch, which {package} must not know"
        if not imported.deferred:
            return "is torch; import it in the function that needs it"
    if top == "shardwright" and package not in TOP:
        target = rest.partition(".")[0]
        if (package, target) in NEVER:
            return f"is never imported by {package}"
        if target != package and LAYER_OF.get(target, len(LAYERS)) >= LAYER_OF[package]:
            return f"is not in a layer below {package}"
    elif package == "ir" and top not in sys.stdlib_module_names:
        return "is not in the standard library, and ir needs nothing else"
    return None


def objections(package: str, source: str) -> list[str]:
    return [
        f"line {imported.line}: {imported.module} {why}"
        for imported in imports(ast.parse(source))
        if (why := objection(package, imported))
    ]


def package_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_lives_in_a_known_package():
    assert FILES
    homeless = [str(f.relative_to(ROOT)) for f in FILES if package_of(f) not in {*LAYER_OF, *TOP}]
    assert not homeless, "give each a layer in LAYERS"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_down(file):
    assert objections(package_of(file), file.read_text()) == []


def test_no_files_import_each_other():
    """Deferred imports, and those for types alone, count too."""
    modules = {module_of(file): file for file in FILES}

    def imported(file):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in modules else node.module

    # The command line and the public names import each other by their nature: all of them.
    graph = {
        name: {other for other in imported(file) if other in modules}
        for name, file in modules.items()
        if package_of(file) not in TOP
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(f"import each other: {' -> '.join(e.args[1])}")


def test_folders_hold_about_a_dozen_files():
    counts: dict[str, int] = {}
    for file in FILES:
        folder = str(file.parent.relative_to(ROOT))
        counts[folder] = counts.get(folder, 0) + (file.name != "__init__.py")
    assert {folder: n for folder, n in counts.items() if n > MAX_FILES} == {}


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_packages_that_load_no_torch(package):
    """`shardwright --help` answers at once, and torch takes seconds to import."""
    names = [
        name
        for file in FILES
        if (name := module_of(file)).split(".")[1:2] == [package] and "__main__" not in name
    ]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


def test_no_file_is_longer_than_the_limit():
    folders = ("shardwright", "tests", "examples", "benchmarks", "docs", "scripts")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*.py")]
    lines = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert {f: n for f, n in lines.items() if n > MAX_LINES} == {}


@pytest.mark.parametrize(
    "package, source",
    [
        ("ir", "import numpy"),
        ("ir", "from shardwright.rules import RULES"),
        ("rules", "from shardwright.tracing import capture"),
        ("program", "from shardwright.tracing import capture"),
        ("rules", "from shardwright import tracing"),
        ("planner", "def f():\n    import torch.fx"),
        ("planner", "from shardwright.runtime.ranks import start"),
        ("planner", "import shardwright"),
        ("planner", "def f():\n    from shardwright.tracing import op_memory"),
        ("simulate", "def f():\n    from shardwright.tracing import op_memory"),
        ("simulate", "import torch"),
        ("planner", "import shardwright.api"),
        ("train", "if TYPE_CHECKING:\n    from shardwright.report import table"),
        ("runtime", "from . import send"),
        ("runtime", "from ..ir import Graph"),
        ("cli", "import torch"),
        ("cli", "try:\n    from torch import nn\nexcept ImportError:\n    pass"),
    ],
)
def test_what_breaks_the_layers_is_found(package, source):
    assert len(objections(package, source)) == 1


@pytest.mark.parametrize(
    "package, source",
    [
        ("ir", "import json\nfrom shardwright.ir.mesh import Mesh"),
        ("rules", "from shardwright.ir import Mesh\nimport numpy as np"),
        ("runtime", "import torch\nfrom shardwright import tracing, ir, rules"),
        ("report", "from shardwright.solve.algebra.frontier import reduce"),
        ("cli", "def run():\n    import torch"),
        ("cli", "if TYPE_CHECKING:\n    import torch"),
        ("cli", "from shardwright import api\nfrom shardwright.report import table"),
    ],
)
def test_what_the_layers_allow_is_left_alone(package, source):
    assert objections(package, source) == []
