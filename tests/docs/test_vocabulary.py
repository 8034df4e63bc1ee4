"""Retired words do not come back as names: the field has better ones (docs/reference/glossary)."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shardwright"
# Word of an identifier -> what to say instead.
RETIRED = {
    "alike": "equal, or by what",
    "apart": "what separates them",
    "brings": "redistributes",
    "brought": "gathered, or redistributed",
    "habits": "numerics",
    "heap": "allocator",
    "held": "memory, bytes, or kept",
    "hubs": "shared inputs",
    "lies": "is stored, or position",
    "lives": "liveness",
    "meet": "barrier",
    "overtaken": "off frontier",
    "piece": "segment, or chunk",
    "pieces": "segments, or chunks",
    "piping": "pipeline search",
    "spoken": "named",
    "told": "reported, or comparable",
    "twofold": "recompute choice",
    "walk": "visit, path or simulation",
    "walks": "paths",
    "watch": "guard, or stopwatch",
}


def packages():
    return sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__")


def identifiers(tree):
    """Names that a file gives: of functions, classes, parameters, variables and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def words(name):
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def retired_in(text):
    found = identifiers(ast.parse(text))
    return [(line, name, w) for line, name in found for w in sorted(words(name) & RETIRED.keys())]


@pytest.mark.parametrize("package", packages())
def test_no_name_uses_a_retired_word(package):
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for line, name, word in retired_in(path.read_text()):
            where = f"{path.relative_to(PACKAGE.parent)}:{line}"
            raise AssertionError(f"{where}: {name!r} uses {word!r}; say {RETIRED[word]}")


def test_words_inside_of_names_are_seen():
    text = "class HubsBound:\n    def _put_apart(self, pieces, hubble): self.told = 1\n"
    found = [word for _, _, word in retired_in(text)]
    assert sorted(found) == ["apart", "hubs", "pieces", "told"]


def repeated(files):
    """Public classes that several of `files`, pairs of a path and a text, define: name -> paths."""
    homes = {}
    for path, text in files:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path)
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_a_class_name_has_one_meaning():
    files = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "public.py"]  # subclasses
    texts = [(str(p.relative_to(PACKAGE)), p.read_text()) for p in files]
    assert repeated(texts) == {}, "give one of them the longer name"


def test_repeated_names_are_seen():
    one, other = (
        ("a.py", "class Call: ...\nclass _Own: ..."),
        ("b.py", "class Call: ...\nclass _Own: ..."),
    )
    assert repeated([one, other]) == {"Call": ["a.py", "b.py"]}


# Clauses without a subject, and lines that say nothing without the docstring before them.
HEADLESS = re.compile(
    r"(How|What|Where|Which|Who|Whom|When|That)\b"
    r"|The same(?:[,.]| (?:as|at|before|by|for|from|in|of|on|where|with|without)\b)"
    r"|Those\b|Likewise\b"
)


def headless(text):
    """First lines of docstrings that are clauses, not statements of what a thing is or does."""
    found = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, found))
    lines = (
        ast.get_docstring(node).partition("\n")[0] for node in nodes if ast.get_docstring(node)
    )
    return [line for line in lines if HEADLESS.match(line)]


def test_first_lines_of_docstrings_say_what_a_thing_is_or_does():
    for path in sorted(PACKAGE.rglob("*.py")):
        assert headless(path.read_text()) == [], path


def test_headless_lines_are_seen():
    assert headless('def f():\n    """What runs."""\nclass C:\n    """Runs."""') == ["What runs."]
    leaning = '"""The same, later."""\ndef f():\n    """Those that run."""\n'
    assert headless(leaning) == ["The same, later.", "Those that run."]
    assert headless('"""The same plan elsewhere."""') == []
