"""The table of figures that `--set-machine` takes (docs/reference/machines.md) fits the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from shardwright.machine.files.figures import changed, parse_figures
from shardwright.machine.files.loading import with_figures
from shardwright.machine.model import Efficiency, MachineError
from shardwright.machine.presets import preset

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "machines.md").read_text()
ROW = re.compile(r"^\| `([\w.]+)` \| [\w/]+ \| `(\S+)` \| (.+) \|$", re.MULTILINE)


def test_the_table_has_every_figure_and_its_examples_are_taken():
    machine = preset("2x8xH100")
    words = {"DTYPE": [dtype for dtype, _ in machine.device.flop_per_s]}
    words["KIND"] = [field.name for field in fields(Efficiency)]
    words["LEVEL"] = [level.name for level in machine.levels]
    found = []
    for name, example, _ in ROW.findall(PAGE):
        word = next((w for w in words if w in name), None)
        names = [name.replace(word, w) for w in words[word]] if word else [name]
        found += names
        for each in names:
            other = with_figures(machine, **parse_figures(f"{each}={example}"))
            assert other != machine
            assert other.name == f"2x8xH100 with {each}={example}"
    with pytest.raises(MachineError, match="there are ") as refused:
        changed(machine, {"": 0.0})
    _, _, listed = str(refused.value).partition("there are ")
    assert sorted(found) == sorted(listed.split(", "))


def test_the_row_of_efficiencies_names_every_kind():
    (text,) = [text for name, _, text in ROW.findall(PAGE) if name == "efficiency.KIND"]
    assert re.findall(r"`(\w+)`", text) == [field.name for field in fields(Efficiency)]
