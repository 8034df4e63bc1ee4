"""Every module has a test of its path, one that imports it, or one that `covered_by.txt` names."""

import ast
from functools import cache

import pytest

from tests.docs.test_layers import FILES, PACKAGE, ROOT

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
MODULES = [file for file in FILES if file.name not in ("__init__.py", "__main__.py")]


def covered_by(text):
    """Module -> test, both as paths, of lines "MODULE TEST"."""
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    found = dict(lines)
    assert len(found) == len(lines), "a module has two lines"
    return found


COVERED_BY = covered_by((ROOT / "tests" / "covered_by.txt").read_text())


@cache
def imported(file):
    """Names that `file` imports, or has in a text: of modules, and of what is in them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def dotted(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = {dotted(file): file for file in FILES}
BY_NAME |= {dotted(file): file for file in (ROOT / "tests").rglob("*.py")}
COMMANDS = {name for name in BY_NAME if name.startswith("shardwright.cli.commands.")}
LOADED_BY_NAME = {"shardwright": {"shardwright.api"}, "shardwright.cli": COMMANDS}


@cache
def reached(test):
    """Modules that `test` imports, directly or through others.

    What all tests have, by the `conftest.py` of `tests`, is no test of a module.
    """
    folders = (folder for folder in test.parents if folder.is_relative_to(ROOT / "tests"))
    fixtures = (folder / "conftest.py" for folder in folders if folder != ROOT / "tests")
    found, ahead = set(), [dotted(test), *(dotted(file) for file in fixtures if file.exists())]
    while ahead:
        name = ahead.pop()
        if name in BY_NAME and name not in found:
            found.add(name)
            ahead += imported(BY_NAME[name]) | LOADED_BY_NAME.get(name, set())
    return found


def own_test(module):
    folder = module.relative_to(PACKAGE).parent
    return ROOT / "tests" / "unit" / folder / f"test_{module.name}"


@pytest.fixture(scope="module")
def named_in_tests():
    return {name for test in TESTS for name in imported(test)}


def test_every_module_is_tested(named_in_tests):
    untested = [
        path
        for module in MODULES
        if (path := str(module.relative_to(PACKAGE))) not in COVERED_BY
        and not own_test(module).exists()
        and dotted(module) not in named_in_tests
    ]
    assert untested == [], "give each a test, or a line in tests/covered_by.txt"


def test_lines_are_needed_and_their_tests_reach_the_module(named_in_tests):
    for path, test in COVERED_BY.items():
        module = PACKAGE / path
        assert module in MODULES, f"{path} is no module; delete its line in tests/covered_by.txt"
        needed = not own_test(module).exists() and dotted(module) not in named_in_tests
        assert needed, f"{path} has a test; delete its line in tests/covered_by.txt"
        assert ROOT / test in TESTS, f"{test} is no test"
        assert dotted(module) in reached(ROOT / test), f"{test} does not reach {path}"


def test_a_module_that_is_not_imported_is_not_reached():
    assert "shardwright.solve.gaps.gap_solver" not in reached(own_test(PACKAGE / "ir" / "graph.py"))


def test_a_second_line_for_a_module_is_seen():
    with pytest.raises(AssertionError, match="two lines"):
        covered_by("a.py tests/x.py\na.py tests/y.py\n")


SMALL = 40  # lines
# A file for each: schedules, passes, commands, families of operators; and what has its own test.
INTERFACES = ("ir/schedules", "program/step/passes", "cli/commands", "rules/operators")


def test_small_files_have_several_importers_or_an_interface():
    importers = {}
    for file in FILES:
        for name in imported(file):
            importers.setdefault(name, set()).add(file)
    for module in MODULES:
        path = module.relative_to(PACKAGE)
        short = len(module.read_text().splitlines()) < SMALL
        alone = len(importers.get(dotted(module), ())) == 1
        interface = path.parent.as_posix() in INTERFACES or own_test(module).exists()
        assert interface or not (short and alone), f"merge {path} into its importer"
