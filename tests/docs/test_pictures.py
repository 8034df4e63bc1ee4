"""Pictures on the pages: they exist, say what they show, and are made of what there is to show."""

import re
from pathlib import Path

import pytest

from benchmarks.record import digest
from scripts import explained

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = ROOT / "docs" / "pictures"
LINKED = [
    pytest.param((page.parent / target).resolve(), words, id=f"{page.stem}-{Path(target).name}")
    for page in PAGES
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
]


@pytest.mark.parametrize("picture, words", LINKED)
def test_a_picture_exists_and_is_put_into_words(picture, words):
    assert picture.is_file()
    assert len(words.split()) >= 4


def test_every_picture_is_on_a_page():
    assert set(PICTURES.iterdir()) == {found.values[0] for found in LINKED}


@pytest.mark.parametrize("name", explained.SHOWN)
def test_a_picture_of_the_explanation_is_made_of_what_there_is(name):
    file = PICTURES / f"{name}.svg"
    text = file.read_text()
    assert digest(explained.SHOWN[name]()) in text, (
        f"run python -m scripts.explanation_pictures {name}"
    )
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>|<metadata>.*</metadata>',
                                "", text, flags=re.S)  # fmt: skip
    assert file.stat().st_size < 60_000


def test_the_picture_of_tilings_shows_megatrons_pair():
    columns, rows = explained.tilings()[1:]
    first, second = columns.devices[0][1], columns.devices[1][1]
    assert (first.left, first.right, second.left, second.right) == (0, 2, 2, 4)
    assert [tiles[2].partial for tiles in rows.devices] == [True] * 4
    assert columns.layouts == ("dp:S(0) tp:R", "dp:R tp:S(0)", "dp:S(0) tp:S(1)")
    samples, features, made = explained.LAYER
    for tiled in explained.tilings():
        every = range(samples * made)
        held = {cell for tiles in tiled.devices for cell in _cells(tiles[2], made)}
        assert held == set(every)
        for x, weight, y in tiled.devices:
            assert (x.top, x.bottom) == (y.top, y.bottom)
            assert (x.left, x.right) == (weight.top, weight.bottom)
            assert (weight.left, weight.right) == (y.left, y.right)
            assert y.partial == (x.right - x.left < features)


def _cells(tile, width):
    return [
        row * width + column
        for row in range(tile.top, tile.bottom)
        for column in range(tile.left, tile.right)
    ]
