"""Dependencies have a reason, a pin, a hash and a licence that are written down."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from scripts.dependencies import MARK, PAGE, PINS, licence, pins

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def declared() -> set[tuple[str, str]]:
    """(package, group) of every dependency in pyproject.toml."""
    groups = {
        "always": PROJECT["project"]["dependencies"],
        "build": PROJECT["build-system"]["requires"],
        **PROJECT["project"]["optional-dependencies"],
    }
    return {
        (name(requirement), group)
        for group, requirements in groups.items()
        for requirement in requirements
        if name(requirement) != "shardwright"
    }


def rows(text: str) -> list[list[str]]:
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_every_dependency_has_a_reason_and_every_reason_a_dependency():
    written = [row for row in rows(PAGE.read_text().partition(MARK)[0]) if len(row) == 3][2:]
    assert {(row[0], row[1]) for row in written} == declared()
    assert all(len(row[2]) > 10 for row in written)


def test_every_dependency_is_pinned():
    pinned = {name(package) for package in pins(PINS.read_text())}
    assert {package for package, _ in declared()} <= pinned


def test_the_lock_has_the_pinned_versions_and_a_hash_for_each():
    lock = (ROOT / "requirements.lock").read_text()
    pinned = {name(p): v for p, v in pins(PINS.read_text()).items() if p != "torch"}
    assert {name(p): v for p, v in pins(lock).items()} == pinned
    entries = re.findall(r"^[A-Za-z0-9].*?(?=^[A-Za-z0-9]|\Z)", lock, re.M | re.S)
    assert len(entries) == len(pinned)
    assert all("--hash=sha256:" in entry for entry in entries)


def test_licences_are_those_of_what_is_installed():
    written = {row[0]: row[1:] for row in rows(PAGE.read_text().partition(MARK)[2]) if row}
    pinned = pins(PINS.read_text())
    assert pinned.keys() <= written.keys()
    installed = {
        package: version
        for package, version in pinned.items()
        if metadata.version(package).partition("+")[0] == version
    }
    assert len(installed) > len(pinned) / 2, "these are not the pinned versions"
    assert {p: written[p] for p in installed} == {p: [v, licence(p)] for p, v in installed.items()}
