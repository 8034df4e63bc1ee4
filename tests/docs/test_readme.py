"""The README and the command line agree: every command is shown, and what is shown exists."""

import re
import shlex
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def console_lines(text: str) -> list[str]:
    """What follows `$ shardwright` in `text`, each command on one line.

    A backslash continues a line; a comment, a pipe or a redirection ends the command.
    """
    joined = re.sub(r"\\\n\s*", "", text)
    shown = re.findall(r"^\s*\$ shardwright\b(.*)$", joined, re.MULTILINE)
    return [re.split(r"\s(?:#|\||>|&&)", line)[0].strip() for line in shown]


def mistakes(line: str, group: click.Group) -> list[str]:
    """The commands and options of `line` that `group` does not have."""
    command: click.Command = group
    wrong = []
    for word in shlex.split(line):
        if word == "--":
            break
        if word.startswith("-"):
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
            wrong += [word] if word.partition("=")[0] not in known else []
        elif command is group:
            found = group.commands.get(word)
            if found is None:
                return [*wrong, word]
            command = found
    return wrong


def command_line() -> click.Group:
    from shardwright.cli import main

    assert isinstance(main, click.Group)
    return main


def test_every_command_is_shown_in_the_readme():
    shown = {line.split()[0] for line in console_lines(README.read_text()) if line}
    assert sorted(set(command_line().commands) - shown) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_on_a_page_uses_existing_commands_and_options(page):
    group = command_line()
    lines = console_lines(page.read_text())
    assert {line: wrong for line in lines if (wrong := mistakes(line, group))} == {}


def test_console_lines_are_found_whole():
    text = "Try\n\n    $ shardwright plan a.py:job \\\n      -o p.json  # so\n$ shardwright\n"
    assert console_lines(text) == ["plan a.py:job -o p.json", ""]


@click.group()
@click.option("--version", is_flag=True)
def sample():
    pass


@sample.command("plan")
@click.argument("target")
@click.option("-o", "--output")
@click.option("--json/--no-json")
def sample_plan(target, output, json):
    pass


@pytest.mark.parametrize(
    "line, wrong",
    [
        ("--version", []),
        ("plan a.py:job -o p.json --no-json", []),
        ("plan --help", []),
        ("plan a.py:job --output=p.json -- --anything", []),
        ("plan a.py:job --memory-limit 40GiB", ["--memory-limit"]),
        ("plan a.py:job --outputs=p.json", ["--outputs=p.json"]),
        ("--verbose plan a.py:job", ["--verbose"]),
        ("draw a.py:job --output p.json", ["draw"]),
    ],
)
def test_mistakes_are_found(line, wrong):
    assert mistakes(line, sample) == wrong
