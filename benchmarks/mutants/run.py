"""Faults put into the package by a mutation tool, and which of them the tests notice.

    python -m benchmarks.mutants.run --mutants 400 -o benchmarks/mutants/result.json

The operators of cosmic-ray were applied at positions drawn by a seed, equally many in each room;
`drawn.json` keeps them (`--draw` draws others). All mutants of `planted.json`, which people made,
are tried too. A mutant is tried with the tests of its module (`rooms.own_tests`) until one fails,
which then runs once without the mutant: if it fails again, it says nothing. A mutant that none of
them notices survived; `explained.json` says which survivors cannot be noticed, and why.

Changes outside of functions need a process that loads the package anew: a second call with `--anew`
tries those. A run goes on where the result ends, and what it has tried is in a file beside the
result until it ends. `--again` tries survivors without an explanation instead of new mutants.
Mutants whose lines were changed before they were tried are left out. The exit status is 1 if a
survivor has no explanation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.mutants import trial
from benchmarks.mutants.mutant import KEPT, PLANTED, Mutant, in_function, planted
from benchmarks.mutants.rooms import ROOMS, own_tests
from benchmarks.mutants.sample import draw, here, sample, seed

EXPLAINED = Path(__file__).parent / "explained.json"
CPU, WALL = 60.0, 1800.0  # seconds that the tests of a mutant may take
KILLED, SURVIVED, ENDED = "killed", "survived", "ended for its time"
_TOO_LATE = 97

Row = dict[str, Any]


def main() -> int:
    """Try mutants, print those that survive, and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw other mutants, and end")
    parser.add_argument("--only", default="", help="those whose names contain this text")
    parser.add_argument("--first", action="append", default=[], help="tests to try first, by id")
    parser.add_argument("--room", choices=[*ROOMS, PLANTED], action="append", help="only these")
    parser.add_argument("--again", action="store_true", help="survivors, not new ones")
    parser.add_argument("--anew", action="store_true", help="changes outside of functions")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no more after that")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    each = given.mutants // len(ROOMS)
    if given.draw is not None:
        draw(each, given.draw)
        return 0
    end = time.monotonic() + 60 * given.minutes
    mutants = [*planted(), *sample(each)]
    journal = given.out.with_suffix(".rows")
    rows = _rows(given.out, journal)
    pending = [m for m in mutants if _is_pending(m, rows.get(m.name), given)]
    by_hand = [m for m in pending if m.operator == PLANTED]
    pending = by_hand + here([m for m in pending if m.operator != PLANTED])
    random.Random(seed()).shuffle(pending)
    pending.sort(key=lambda m: own_tests(m.path)[0].startswith("tests/ranks/"))  # the slowest
    for row in tried(pending, rows, given, end):
        row["at_first"] = rows.get(row["name"], {}).get("at_first", row["verdict"])
        rows[row["name"]] = row
        with journal.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(f"{row['verdict']:9} {row['name']}  [{row['by']}] {row['seconds']} s", flush=True)
    found = explained([rows[m.name] for m in mutants if m.name in rows])
    # Several calls may have made the result; this one goes on where they ended.
    command = f"python -m benchmarks.mutants.run --mutants {given.mutants}"
    drawn = sum(m.operator != PLANTED for m in mutants)
    result = {"command": command, "drawn": drawn, "rooms": summary(found), "mutants": found}
    record.write(result, given.out, seed())
    journal.unlink(missing_ok=True)
    return int(any(row["verdict"] != KILLED and not row["reason"] for row in found))


def _is_pending(mutant: Mutant, row: Row | None, given: argparse.Namespace) -> bool:
    if given.only not in mutant.name:
        return False
    if given.room and _room(mutant.as_row()) not in given.room:
        return False
    if row is None or not given.again:
        return row is None and not given.again
    return row["verdict"] != KILLED and row["name"] not in _reasons()


def tried(
    mutants: list[Mutant], before: dict[str, Row], given: argparse.Namespace, end: float
) -> Iterator[Row]:
    """A row for each mutant, as they are tried; `before` knows which tests noticed others.

    Those in the body of a function, or with `given.anew` the others.
    """
    if not mutants or time.monotonic() > end:
        return
    trial.load_libraries()
    KEPT.mkdir(parents=True, exist_ok=True)
    sources = {m.path: (record.ROOT / m.path).read_text() for m in mutants}
    warm = [m for m in mutants if in_function(sources[m.path], m.line)]
    killers: dict[str, Counter[str]] = {}  # by module
    for row in before.values():
        killers.setdefault(_path(row), Counter())[row["by"]] += 1

    def first(mutant: Mutant) -> list[str]:
        """Tests that noticed another mutant of the module are tried first."""
        noticed = (test for test, _ in killers.get(mutant.path, Counter()).most_common(5))
        return [*given.first, *(test for test in noticed if "::" in test)]

    if not given.anew:
        trial.load_package()
    some = [m for m in mutants if (m in warm) != given.anew]
    tasks = [trial.Task(m.name, partial(_try, m, first, end, not given.anew)) for m in some]
    by_name = {m.name: m for m in some}
    for task, status, seconds in trial.outcomes(tasks, given.jobs, WALL):
        if status == trial.BROKEN:
            print(f"not tried: {task.name}", flush=True)
        elif status != _TOO_LATE:
            row = _row(by_name[task.name], status, seconds)
            if "::" in row["by"] and _fails_without(row["by"], not given.anew):
                print(f"not tried: {task.name}: {row['by']} fails without it", flush=True)
                continue
            killers.setdefault(_path(row), Counter())[row["by"]] += 1
            yield row


def _out(mutant: Mutant) -> Path:
    return KEPT / f"{record.digest(mutant.name)[:16]}.json"


def _try(mutant: Mutant, first: Callable[[Mutant], list[str]], end: float, loaded: bool) -> int:
    if time.monotonic() > end:
        return _TOO_LATE
    _out(mutant).unlink(missing_ok=True)
    tests = [*own_tests(mutant.path)]
    return trial.try_tests(mutant, first(mutant), tests, _out(mutant), CPU, loaded=loaded)


def _fails_without(test: str, loaded: bool) -> bool:
    """Whether a test fails in the package as it is, as some do on a busy host."""
    out = KEPT / "without.json"
    run = partial(trial.try_tests, None, [], [test], out, CPU, loaded=loaded)
    ((_, status, _),) = trial.outcomes([trial.Task(test, run)], 1, WALL)
    return status != 0


def _path(row: Row) -> str:
    """The module that a row's mutant changes."""
    return str(row["name"].partition(": ")[0])


def _row(mutant: Mutant, status: int | None, seconds: float) -> Row:
    out, verdict, by = _out(mutant), KILLED if status else SURVIVED, ""
    if status is None or status < 0:
        verdict = ENDED
    elif status:
        by = json.loads(out.read_text())["by"] if out.exists() else ""
        by = by or "the package or a test cannot be imported"
    return {
        "name": mutant.name,
        "line": mutant.line,
        "room": mutant.room,
        "operator": mutant.operator,
        "verdict": verdict,
        "by": by,
        "seconds": round(seconds, 1),
        "commit": record.commit(),
    }


def _rows(out: Path, journal: Path) -> dict[str, Row]:
    """What was tried before: rows of the result, replaced by those of a run that did not end."""
    rows = json.loads(out.read_text())["mutants"] if out.exists() else []
    lines = journal.read_text().splitlines() if journal.exists() else []
    return {row["name"]: row for row in [*rows, *map(json.loads, lines)]}


def explained(rows: list[Row]) -> list[Row]:
    """Rows with the reason why a survivor cannot be noticed, if there is one."""
    reasons = _reasons()
    return [
        {**row, "reason": "" if row["verdict"] == KILLED else reasons.get(row["name"], "")}
        for row in rows
    ]


def _reasons() -> dict[str, str]:
    """Why mutants cannot be noticed, by name."""
    return dict(json.loads(EXPLAINED.read_text()))


def _room(row: Row) -> str:
    """The room that a row counts for; those that people made are one of their own."""
    return PLANTED if row["operator"] == PLANTED else str(row["room"])


def summary(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Counts by room: tried, killed at first, killed, survivors with a reason, those without."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        room = _room(row)
        kind = row["verdict"]
        if kind != KILLED:
            kind = "explained" if row["reason"] else "left"
        counts.setdefault(room, Counter())[kind] += 1
        counts[room]["killed at first"] += row["at_first"] == KILLED
    kinds = "killed at first", KILLED, "explained", "left"
    return {
        room: {"tried": found.total() - found[kinds[0]], **{kind: found[kind] for kind in kinds}}
        for room, found in counts.items()
    }


if __name__ == "__main__":
    sys.exit(main())
