"""Rooms of the campaign, their modules, and which test files are a module's own."""

from __future__ import annotations

from functools import cache

from benchmarks.record import ROOT
from tests.docs import test_mirror

PACKAGE = ROOT / "shardwright"
_PREDICTION = ("runtime/async_pipeline/prediction.py", "runtime/async_pipeline/pipemare_lr.py")
_OPTIMIZERS = ("ir/options/optimizers.py", "ir/options/optimizer_spec.py", "ir/options/muon.py")
# Room -> what its modules' paths begin with.
ROOMS = {
    "rules": ("rules/",),
    "solve": ("solve/",),
    "planner": ("planner/",),
    "program": ("program/",),
    "simulate": ("simulate/",),
    "runtime": ("runtime/",),
    "checkpoint": ("train/checkpoint/",),
    "optimizers": (*_PREDICTION, *_OPTIMIZERS),
}


@cache
def modules(room: str) -> list[str]:
    """Paths of a room's modules; none is of two rooms."""
    others = {path for name, some in ROOMS.items() if name != room for path in some}
    paths = (str(file.relative_to(PACKAGE)) for file in sorted(PACKAGE.rglob("*.py")))
    return [
        f"shardwright/{path}"
        for path in paths
        if path.startswith(ROOMS[room]) and path not in others and not path.endswith("__init__.py")
    ]


def _near(inner: str) -> tuple[str, ...]:
    """Folders of tests of a module's package."""
    return f"tests/unit/{inner.partition('/')[0]}/", "tests/property/", "tests/regressions/"


@cache
def own_tests(module: str) -> tuple[str, ...]:
    """Test files of a module: that of its path or named for it, and importers in its package.

    If none has its path and none is named, all tests that import it are its own. The last one is
    the module itself if its docstrings have examples, which are tests too.
    """
    file = ROOT / module
    mirror = test_mirror.own_test(file)
    inner = module.removeprefix("shardwright/")
    named = test_mirror.COVERED_BY.get(inner)
    importing = sorted(
        str(test.relative_to(ROOT))
        for test in test_mirror.TESTS
        if test_mirror.dotted(file) in test_mirror.imported(test)
    )
    first = str(mirror.relative_to(ROOT)) if mirror.exists() else named
    examples = [module] if ">>>" in file.read_text() else []
    if first is None:
        return (*importing, *examples)
    near = [test for test in importing if test.startswith(_near(inner))]
    return tuple(dict.fromkeys([first, *near, *examples]))
