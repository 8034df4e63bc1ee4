"""The sample of mutants of a campaign, in a file, so that changes of the code do not change it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

from benchmarks.mutants.mutant import Mutant, drawn, locate
from benchmarks.mutants.rooms import ROOMS, modules
from benchmarks.record import ROOT, commit, digest

DRAWN = Path(__file__).parent / "drawn.json"
_SOURCE = "source"  # digest of the module that a mutant was drawn from


def draw(count: int, seed: int) -> None:
    """Draw `count` different mutants of each room from the code as it is, and keep them."""
    rows = []
    for room in ROOMS:
        sources = {path: (ROOT / path).read_text() for path in modules(room)}
        draws = drawn(room, sources, random.Random(f"{seed} {room}"))
        found: dict[str, Mutant] = {}
        while len(found) < count:
            found |= {m.name: m for m in islice(draws, count - len(found))}
        rows += [{**m.as_row(), _SOURCE: _digest(sources[m.path])} for m in found.values()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'"commit": "{commit()}", "seed": {seed}'
    DRAWN.write_text(f'{{{head}, "mutants": [\n{lines}\n]}}\n')


def sample(count: int) -> list[Mutant]:
    """The first `count` mutants of each room that were drawn, as they were then."""
    rows = json.loads(DRAWN.read_text())["mutants"]
    found = [Mutant(**{k: v for k, v in row.items() if k != _SOURCE}) for row in rows]
    return [m for room in ROOMS for m in [m for m in found if m.room == room][:count]]


def seed() -> int:
    """The seed of the sample."""
    return int(json.loads(DRAWN.read_text())["seed"])


def here(mutants: list[Mutant]) -> list[Mutant]:
    """Those of drawn mutants whose lines are in the code as it is now, where they are now."""
    rows = json.loads(DRAWN.read_text())["mutants"]
    sources = {(row["path"], row["before"], row["after"]): row[_SOURCE] for row in rows}
    found = []
    for mutant in mutants:
        text = (ROOT / mutant.path).read_text() if (ROOT / mutant.path).exists() else ""
        if _digest(text) == sources[mutant.path, mutant.before, mutant.after]:
            found.append(mutant)
        elif (at := locate(mutant, text)) is not None:
            found.append(replace(mutant, line=at[0], occurrence=at[1]))
    return found


def _digest(source: str) -> str:
    return digest(source)[:12]
