"""What the documentation site takes from the code: commands, public names, errors.

A hook of mkdocs. Pages hold a marker where the text belongs, so that a page is
never older than the code. Links that leave the documentation become plain text.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardwright"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill the markers of a page."""
    for marker, text in (("commands", commands), ("python", names), ("errors", errors)):
        if f"<!-- {marker} -->" in markdown:
            markdown = markdown.replace(f"<!-- {marker} -->", "\n".join(text()))
    return re.sub(r"\[([^\]]*)\]\(\s*(?:\.\./)+(?!docs/)[^)]*\)", _outside, markdown)


def _outside(link: re.Match[str]) -> str:
    """A link to another page stays, one to a file of the repository becomes its text."""
    return link[0] if re.search(r"\.md(#[^)]*)?\)$", link[0]) else link[1]


def commands() -> Iterator[str]:
    """Every command with its arguments and options, as `--help` has them."""
    from shardwright.cli import main

    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"shardwright {name}")
        yield f"## {name}\n"
        yield f"    {command.get_usage(context).removeprefix('Usage: ')}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        yield "| option | |\n| --- | --- |"
        for option in options(command):
            flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
            value = f" `{option.make_metavar(context)}`" if not option.is_flag else ""
            default = f" By default `{option.default}`." if option.show_default else ""
            yield f"| {flags}{value} | {_cell(option.help or '')}{default} |"
        yield ""


def options(command: click.Command) -> list[click.Option]:
    """The options of a command, in their order."""
    return [p for p in command.params if isinstance(p, click.Option)]


def names() -> Iterator[str]:
    """Every public name with its signature and docstring; of classes, what they offer."""
    import shardwright

    for name in sorted(shardwright.__all__):
        found = getattr(shardwright, name)
        yield f"## {name}\n"
        if inspect.isclass(found):
            yield f"{_doc(found)}\n"
            for member, value in members(found):
                yield f"### {name}.{member}{_signature(value)}\n"
                yield f"{_doc(value)}\n"
        else:
            yield f"    shardwright.{name}{_signature(found)}\n"
            yield f"{_doc(found)}\n"


def members(kind: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties of a class that have a docstring."""
    for name in sorted(vars(kind) | {n: None for base in kind.__mro__[1:-1] for n in vars(base)}):
        value = inspect.getattr_static(kind, name)
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        documented = isinstance(value, property) or inspect.isfunction(value)
        if not name.startswith("_") and documented and value.__doc__:
            yield name, value


def errors() -> Iterator[str]:
    """Every error that the user's input can raise, by module."""
    yield "| error | raised for |\n| --- | --- |"
    for module, name in error_classes():
        found = getattr(importlib.import_module(module), name)
        yield f"| `{module}.{name}` | {_cell(found.__doc__ or '')} |"


def error_classes() -> Iterator[tuple[str, str]]:
    """Module and name of every class of the package that is an error of the user's."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                found: ModuleType = importlib.import_module(module)
                if issubclass(getattr(found, node.name), ValueError | RuntimeError):
                    yield module, node.name


def _signature(value: object) -> str:
    if isinstance(value, property) or not callable(value):
        return ""
    text = str(inspect.signature(value))
    return re.sub(r"\((self|cls)(, )?", "(", text, count=1)


def _doc(value: object) -> str:
    """The docstring, its examples as code."""
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    return re.sub(r"(?m)^(>>> .*(?:\n(?!\n).*)*)", r"```pycon\n\1\n```", text)


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(inspect.cleandoc(text).split()).replace("|", "\\|")
