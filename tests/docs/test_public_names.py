"""The public names of the package: a new one is a promise, so it is added here on purpose."""

from pathlib import Path

import shardwright

PUBLIC = [
    "Frontier",
    "Job",
    "Machine",
    "Plan",
    "StoredWeights",
    "Strategy",
    "capture",
    "parallelize",
    "plan",
    "price",
    "rule",
    "search",
    "strategies",
    "verify",
]


def test_the_public_names_are_exactly_these():
    assert sorted(shardwright.__all__) == PUBLIC


def test_every_public_name_is_there_and_documented():
    undocumented = [name for name in PUBLIC if not getattr(shardwright, name).__doc__]
    assert not undocumented


def test_no_package_hides_a_public_name():
    """`import shardwright.x.y` puts the package `x` where the public name `x` would be."""
    folder = Path(shardwright.__file__).parent
    parts = {path.stem for path in folder.iterdir()}
    assert not parts & set(PUBLIC)
