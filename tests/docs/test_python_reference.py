"""The generated Python reference: every public name is there, and its docstring is complete."""

import dataclasses
import importlib
import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import yaml

import shardwright

PAGES = [Path(__file__).parents[2] / "docs" / "reference" / f"{n}.md" for n in ("python", "train")]
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n?)*)", re.M)


def directives():
    """Path of each object on the pages, with the options of its directive."""
    for page in PAGES:
        for path, text in DIRECTIVE.findall(page.read_text()):
            yield path, (yaml.safe_load(text) or {}).get("options", {})


def found(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def described(doc, section):
    """Names that a section of a docstring describes."""
    text = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", inspect.cleandoc(doc or ""), re.M)
    return set(re.findall(r"^    (\w+): \S", text[1], re.M)) if text else set()


def parameters(function):
    names = inspect.signature(function).parameters
    return {name for name in names if name not in ("self", "cls")}


def lacking(value, members=(), init=True):
    """What the docstrings of a function, or of a class and its members, do not describe."""
    if not inspect.isclass(value):
        return ["docstring"] if not value.__doc__ else sorted(
            parameters(inspect.unwrap(value)) ^ described(value.__doc__, "Args")
        )  # fmt: skip
    if dataclasses.is_dataclass(value):
        names = {field.name for field in dataclasses.fields(value)}
        missing = sorted(names ^ described(value.__doc__, "Attributes"))
    else:
        missing = sorted(parameters(value.__init__) - described(value.__doc__, "Args")) * init
    for name in members:
        member = inspect.getattr_static(value, name)
        if isinstance(member, property):
            missing += [] if member.fget.__doc__ else [name]
        else:
            function = getattr(member, "__func__", member)
            missing += [f"{name}: {what}" for what in lacking(function)]
    return missing


CASES = [(path, dict(options)) for path, options in directives()]


@pytest.mark.parametrize("path, options", CASES, ids=[path for path, _ in CASES])
def test_docstrings_describe_every_argument(path, options):
    init = options.get("merge_init_into_class", True)
    assert lacking(found(path), options.get("members", ()), init) == []


def test_every_public_name_is_on_a_page():
    shown = {o["heading"]: found(path) for path, o in CASES if "heading" in o}
    public = {f"shardwright.{n}": getattr(shardwright, n) for n in shardwright.__all__}
    assert set(shown) == set(public)
    assert all(inspect.unwrap(public[n]) is inspect.unwrap(shown[n]) for n in shown)


@pytest.mark.parametrize("name", ["Frontier", "Job", "Machine", "Plan"])
def test_every_method_of_a_public_class_is_shown(name):
    options = next(o for _, o in CASES if o.get("heading") == f"shardwright.{name}")
    methods = {
        key
        for key, value in vars(getattr(shardwright, name)).items()
        if not key.startswith("_")
        and (isinstance(value, classmethod | property) or inspect.isfunction(value))
    }
    assert methods - {"of", "other_calls", "numerics"} <= set(options["members"])


def test_what_lacks_a_description_is_found(monkeypatch):
    for path, options in CASES:
        value = found(path)
        members = options.get("members", ())
        check = partial(lacking, value, members, options.get("merge_init_into_class", True))
        if inspect.isclass(value) and not dataclasses.is_dataclass(value) and members:
            value = inspect.getattr_static(value, members[0])
        with monkeypatch.context() as without:
            without.setattr(value, "__doc__", "Says nothing.")
            assert check() != [], path
