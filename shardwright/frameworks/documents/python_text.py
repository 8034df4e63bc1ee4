"""Python configs, read as a syntax tree for values that stand in the text; nothing is executed.

Read is one function: keywords of nested calls (`Trainer.Config(training=TrainingConfig(steps=8))`)
and assignments to fields (`config.training.steps = 8`). A call is the name that is called.
"""

from __future__ import annotations

import ast
import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.frameworks.documents.document import (
    DEEPEST,
    Document,
    Entry,
    Syntax,
    in_place,
    line_end,
    not_editable,
    put,
)
from shardwright.frameworks.errors import FrameworkError

MOST_BYTES = 2**19
BASELINE = "baseline"  # the key of the function that a config begins with


def parse(name: str, text: str) -> Document:
    """The values of the last function of a file that returns a config."""
    if len(text) > MOST_BYTES:
        raise FrameworkError(f"{name}: Python of more than {MOST_BYTES} characters is not read")
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        where = f", line {e.lineno}" if e.lineno else ""
        raise FrameworkError(f"{name}{where}: it is no Python: {e.msg}") from e
    except (ValueError, RecursionError, MemoryError) as e:  # NUL bytes, nested brackets
        raise FrameworkError(f"{name}: it is no Python: {e or 'it nests too deeply'}") from e
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise FrameworkError(f"{name}: it has no function that returns a config")
    function = functions[-1]
    known = {one.name: one for one in functions[:-1]}
    try:
        entries = list(_function(text, function, known, 0))
    except RecursionError as e:
        raise FrameworkError(f"{name}: it is no config: it nests too deeply") from e
    return Document.of(name, "python", text, entries)


def _function(
    text: str, function: ast.FunctionDef, known: dict[str, ast.FunctionDef], depth: int
) -> Iterator[Entry]:
    """The entries of a function, those of the functions of the file that it begins with first."""
    places = _Places(text)
    for statement in function.body:
        match statement:
            case ast.Assign(targets=[ast.Name()], value=ast.Call() as call):
                yield from _root(text, call, known, depth, places)
            case ast.Return(value=ast.Call() as call):
                yield from _root(text, call, known, depth, places)
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                path = _attributes(target)
                if path:
                    yield from _entry(path, value, places, statement)


def _root(
    text: str,
    call: ast.Call,
    known: dict[str, ast.FunctionDef],
    depth: int,
    places: _Places,
) -> Iterator[Entry]:
    """The entries of the call that makes the config."""
    called = _dotted(call.func)
    if called in known and depth < DEEPEST:
        # Another function may be the baseline of more: its text is not edited.
        for entry in _function(text, known[called], known, depth + 1):
            yield Entry(entry.key, entry.value, entry.line)
        return
    yield Entry(BASELINE, called, call.lineno)
    for keyword in call.keywords:
        if keyword.arg:
            yield from _entry((keyword.arg,), keyword.value, places, None)


class _Places:
    """Positions in the text of the places in a syntax tree, whose columns count bytes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = list(io.StringIO(text, newline=""))  # a form feed ends no line
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]

    def of(self, line: int, column: int) -> int:
        """The position of a line, from 1, and a column in bytes."""
        characters = len(self.lines[line - 1].encode()[:column].decode(errors="ignore"))
        return self.starts[line - 1] + characters

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The span of a node in the text."""
        start = self.of(node.lineno, node.col_offset)
        return start, self.of(node.end_lineno or node.lineno, node.end_col_offset or 0)


def _entry(
    path: tuple[str, ...], value: ast.expr, places: _Places, statement: ast.stmt | None
) -> Iterator[Entry]:
    """The entries of a value: its own, and those of the calls inside."""
    whole = None
    if statement is not None:
        start, end = places.span(statement)
        first = places.text.rfind("\n", 0, start) + 1
        whole = (first, min(line_end(places.text, end) + 1, len(places.text)))
    yield Entry(".".join(path), _valued(value), value.lineno, places.span(value), whole)
    calls = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for number, call in enumerate(calls):
        if isinstance(call, ast.Call):
            inner = path if call is value else (*path, str(number))
            for place, argument in enumerate(call.args):
                if isinstance(argument, ast.Constant):
                    yield from _entry((*inner, str(place)), argument, places, None)
            for keyword in call.keywords:
                if keyword.arg:
                    yield from _entry((*inner, keyword.arg), keyword.value, places, None)


def _valued(node: ast.expr) -> Any:
    """The value of a literal; of a call, the name that is called; else the text of the node."""
    match node:
        case ast.Call(func=function):
            return _dotted(function)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_valued(element) for element in elements]
        case ast.Constant(value=value) if value is ... or isinstance(value, bytes | complex):
            return repr(value)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _dotted(node)


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of nested attributes; else the kind of the node."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else type(node).__name__)
    return ".".join(reversed(parts))


def _attributes(node: ast.Attribute) -> tuple[str, ...]:
    """The fields below a variable: ("training", "steps") of `config.training.steps`."""
    parts: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return tuple(reversed(parts)) if isinstance(inner, ast.Name) else ()


def changed(document: Document, key: str, value: Any, near: str | None) -> str:
    """The text with one value replaced, or an assignment added or deleted."""
    text, shown = document.text, value.text if isinstance(value, Code) else repr(value)
    if (found := in_place(document, key, value, lambda _: shown)) is not None:
        return found
    function = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)][-1]
    last = function.body[-1]
    if not (isinstance(last, ast.Return) and isinstance(last.value, ast.Name)):
        raise not_editable(document, near or key)
    start = _Places(text).span(last)[0]
    indent = text[text.rfind("\n", 0, start) + 1 : start]
    return put(text, (start, start), f"{last.value.id}.{key} = {shown}\n{indent}")


@dataclass(frozen=True, slots=True)
class Code:
    """A value that is an expression of Python, and what it is read back as."""

    text: str
    value: Any


PYTHON = Syntax("python", parse, changed)
