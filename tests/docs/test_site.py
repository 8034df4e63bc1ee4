"""The documentation site: everything public is documented, and its links lead somewhere."""

import re
from functools import partial
from pathlib import Path

import pytest

from scripts import site_pages
from shardwright.ir.frontier import InfeasibleError
from tests.docs.test_readme_output import CONCEPTS
from tests.ranks.test_pages import PAGES, PARTS, blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def commands():
    from shardwright.cli import main

    return main.commands


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_says_what_it_is_for(name):
    command = commands()[name]
    assert command.help
    silent = [o.opts[0] for o in site_pages.options(command) if not o.help]
    assert silent == []


def test_every_option_is_used_by_a_test():
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in commands().items()
        for option in site_pages.options(command)
        if not any(f'"{flag}' in tests for flag in (*option.opts, *option.secondary_opts))
    ]
    assert silent == []


def test_the_page_of_commands_has_all_of_them():
    page = "\n".join(site_pages.commands())
    for name, command in commands().items():
        section = re.search(rf"^## {name}$(.*?)(?=^## |\Z)", page, re.M | re.S)[1]
        for option in site_pages.options(command):
            assert all(f"`{flag}`" in section for flag in option.opts)


def test_every_error_is_documented():
    found = list(site_pages.error_classes())
    assert ("shardwright.ir.frontier", "InfeasibleError") in found
    page = "\n".join(site_pages.errors())
    for module, name in found:
        row = next(line for line in page.splitlines() if f"`{module}.{name}`" in line)
        assert len(row.split("|")[2].strip()) > 10, f"{name} needs a docstring"


def test_what_lacks_documentation_is_found(monkeypatch):
    plan = commands()["plan"]
    said = partial(test_every_command_and_option_says_what_it_is_for, "plan")
    for lacking, field, check in [
        (plan, "help", said),
        (site_pages.options(plan)[0], "help", said),
        (InfeasibleError, "__doc__", test_every_error_is_documented),
    ]:
        with monkeypatch.context() as without:
            without.setattr(lacking, field, None)
            with pytest.raises(AssertionError):
                check()


def test_the_navigation_leads_to_pages():
    listed = re.findall(r"[:-] (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert [name for name in listed if not (DOCS / name).exists()] == []
    missing = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")} - set(listed)
    assert missing == set(), "give them a line in mkdocs.yml"


def test_links_of_pages_lead_somewhere():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", " ".join(page.read_text().split())):
            assert (page.parent / target.strip()).exists(), f"{page.name}: {target}"


def test_pages_with_code_are_run_or_named():
    with_code = {page for page in DOCS.rglob("*.md") if blocks(page)}
    others = {p.name for p in with_code - {*PAGES, CONCEPTS}}  # a test of README runs that
    assert others <= set(PARTS), "move them to how-to, where blocks are run, or name them in PARTS"


def test_topic_pages_have_a_status_and_are_in_the_index():
    folder = DOCS / "explanation"
    index = (folder / "index.md").read_text()
    topics = [p for p in folder.glob("*.md") if p.name not in ("index.md", "concepts.md")]
    assert len(topics) > 10
    assert [p.name for p in topics if "\n> **Status:** " not in p.read_text()] == []
    assert [p.name for p in topics if f"]({p.name})" not in index] == []
