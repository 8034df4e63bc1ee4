"""Mutants of modules, made by the operators of cosmic-ray."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT

TOOLS = ROOT / "build" / "mutation"
KEPT = ROOT / "build" / "mutants"  # what is found out once
INSTALL = (
    "pip install --require-hashes --no-deps --target build/mutation -r benchmarks/mutants/tool.lock"
)


PLANTED = "planted"  # in place of an operator's name: `before` is replaced by `after`


@dataclass(frozen=True)
class Mutant:
    """One change of a module; `line` counts from 1."""

    room: str
    path: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """What identifies the mutant as long as its line does not change."""
        return f"{self.path}: {self.before} -> {self.after}"

    def source(self) -> str:
        """The module with the change."""
        if self.operator == PLANTED:
            return (ROOT / self.path).read_text().replace(self.before, self.after)
        found = mutated((ROOT / self.path).read_text(), self.operator, self.occurrence)
        assert found is not None
        return found

    def as_row(self) -> dict[str, Any]:
        """The mutant as JSON."""
        return asdict(self)


def load_tools() -> None:
    """Make the pinned tools importable."""
    if not TOOLS.exists():
        raise SystemExit(f"the mutation tool is missing: {INSTALL}")
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))


@cache
def operators() -> dict[str, Any]:
    """The operators of cosmic-ray that take no arguments, by name."""
    load_tools()
    from cosmic_ray.operators.provider import OperatorProvider

    provider = OperatorProvider()
    return {name: provider[name]() for name in provider if not provider[name].arguments()}


Site = tuple[int, list[tuple[str, int]]]  # line; (operator, occurrence) of each mutation of it


def sites(source: str) -> list[Site]:
    """Positions that can be mutated, in order; it takes long, and is kept in a file."""
    kept = KEPT / "sites" / f"{hashlib.sha256(source.encode()).hexdigest()[:24]}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(_sites(source)))
    return [
        (line, [(name, at) for name, at in some]) for line, some in json.loads(kept.read_text())
    ]


def _sites(source: str) -> list[Site]:
    load_tools()
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name, operator in operators().items():
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, position in enumerate(positions):
            found.setdefault(position[0], []).append((name, occurrence))
    return [(line, changes) for (line, _), changes in sorted(found.items())]


def mutated(source: str, operator: str, occurrence: int) -> str | None:
    """`source` with one mutation; None if it is no Python, or the program is the same."""
    load_tools()
    from cosmic_ray.ast import Visitor, get_ast

    class Change(Visitor):  # type: ignore[misc] # cosmic-ray has no types
        count = 0

        def visit(self, node: Any) -> Any:
            for index, _ in enumerate(operators()[operator].mutation_positions(node)):
                if self.count == occurrence:
                    node = operators()[operator].mutate(node, index)
                self.count += 1
            return node

    changed: str = Change().walk(get_ast(source)).get_code()
    try:
        same = _meaning(changed) == _meaning(source)
    except SyntaxError:
        return None
    return None if same else changed


def _meaning(source: str) -> str:
    """The syntax tree without what no run of a correct program depends on.

    That are annotations, `@final`, and the flags of dataclasses that forbid something.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) != "final"]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass":
            node.keywords = [k for k in node.keywords if k.arg not in ("frozen", "slots")]
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def drawn(room: str, sources: Mapping[str, str], draw: random.Random) -> Iterator[Mutant]:
    """Mutants of modules without end: each position is as likely, then each operator at it."""
    places = [
        (path, line, changes) for path, source in sources.items() for line, changes in sites(source)
    ]
    while True:
        path, line, changes = draw.choice(places)
        operator, occurrence = draw.choice(changes)
        after = mutated(sources[path], operator, occurrence)
        if after is not None:
            old, new = _difference(sources[path], after)
            yield Mutant(room, path, line, operator, occurrence, old, new)


def locate(mutant: Mutant, source: str) -> tuple[int, int] | None:
    """Line and occurrence of a mutation that changes the same lines to the same; None if none."""
    for line, changes in sites(source):
        for operator, occurrence in changes:
            if operator == mutant.operator:
                after = mutated(source, operator, occurrence)
                if after and _difference(source, after) == (mutant.before, mutant.after):
                    return line, occurrence
    return None


def planted() -> list[Mutant]:
    """Faults that people chose, each of which tests once did not notice."""
    found = []
    for row in json.loads((Path(__file__).parent / "planted.json").read_text()):
        text = (ROOT / row["path"]).read_text()
        before, after = row["before"], row["after"]
        assert text.count(before) == 1, f"{row['path']} does not have once: {before}"
        line = text[: text.index(before)].count("\n") + 1
        found.append(Mutant(row["room"], row["path"], line, PLANTED, 0, before, after))
    return found


def _difference(before: str, after: str) -> tuple[str, str]:
    """Lines that differ, of both."""
    lines = [*difflib.ndiff(before.splitlines(), after.splitlines())]
    old, new = (" ".join(x[2:].strip() for x in lines if x[:2] == sign) for sign in ("- ", "+ "))
    return old.strip(), new.strip()


def in_function(source: str, line: int) -> bool:
    """Whether `line` is in the body of a function, which can be exchanged in a loaded module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            if node.body[0].lineno <= line <= end and node.body[0].lineno > node.lineno:
                return True
    return False
