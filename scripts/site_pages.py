"""What the documentation site takes from the code: commands and errors.

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
    for marker, text in (("commands", commands), ("errors", errors)):
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


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(inspect.cleandoc(text).split()).replace("|", "\\|")
