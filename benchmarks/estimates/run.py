"""Predicted against measured: step time and peak memory of several plans for each of ten models.

    python -m benchmarks.estimates.run -o benchmarks/estimates/result.json --page docs/estimates.md
    python -m benchmarks.estimates.run --parts -o benchmarks/estimates/parts.json \\
        --page docs/estimates.md
    python -m benchmarks.estimates.run -o some.json --quick

On two local processes of one thread each, and for three models on two hosts that a link of
1 Gbit/s joins (where hosts can be made: `benchmarks/hosts`). Steps of a model's plans are taken in
turn, in an order that changes, by ranks that start anew now and then: how a process lies in memory
makes a plan some percent faster or slower as long as it runs. A row's time is the median of the
slower rank's steps, each relative to the others of its round, its memory the largest of the ranks',
each the median of three steps'. Where the chosen plan is one of the others, it runs once for both.

How fast a shared host is changes by the minute, which no estimate can know. So the machine and the
operators that dominate are measured before the steps of each model and once more after them, and
a plan's prediction is the mean of both; how far they are apart is its drift. Plans are chosen by
the first alone. Where steps spread, or predictions drift, by more than `UNREST` on average over a
model's plans, all of it is measured again, `--times` at most, and the quietest time counts.

Every row is written as it comes, to RESULT.rows; started again on the same commit, the run goes on
where it was (`--fresh`: from the start). What fails is noted and passed over. About 25 minutes on
an idle machine of two cores, and up to 40 on a restless one; after `--minutes` no new model is
begun, and on one host none after what the two hosts need of it.

`--parts`: instead, plans of four of the models in micro-batches, in pipeline stages and with
sharded replicas (`kinds.py`), each model measured once; about 12 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.estimates import page
from benchmarks.estimates.kinds import BATCHES, KINDS
from benchmarks.estimates.models import MODELS
from benchmarks.estimates.places import Local, Place, two_hosts
from benchmarks.estimates.rows import Row, paced, row, slower, summary, unrest
from benchmarks.estimates.subjects import Subject, searched, warn
from benchmarks.estimates.worker import SEED
from benchmarks.hosts import HostsUnavailableError
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.model import Machine

# A model by name, on a machine, its operators timed for so many seconds.
Make = Callable[[str, Machine, float], Subject]
REMOTE, REMOTE_BIT_PER_S = ("mlp", "vgg", "gpt2"), 1e9
REMOTE_SECONDS = 110.0  # for each of them
UNREST = 0.12
QUICK = ("mlp", "vgg", "bert", "lstm")


class Log:
    """What was found so far, a JSON object a line; those of another commit do not count."""

    def __init__(self, file: Path, fresh: bool) -> None:
        self._file = file
        commit = record.provenance(SEED)["commit"]
        lines = [] if fresh or not file.exists() else file.read_text().splitlines()
        self._found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if not self._found or self._found[0] != {"commit": commit}:
            self._found = []
            file.write_text("")
            self.add({"commit": commit})

    def add(self, found: dict[str, Any]) -> None:
        """Keep it, also if the next model should take all with it."""
        self._found.append(found)
        with self._file.open("a") as out:
            out.write(json.dumps(found) + "\n")

    @property
    def rows(self) -> list[Row]:
        return [Row(**found["row"]) for found in self._found if "row" in found]

    @property
    def failures(self) -> list[str]:
        done = {(one.place, one.model) for one in self.rows}
        return [
            found["failure"]
            for found in self._found
            if "failure" in found and tuple(found["of"]) not in done
        ]

    def machines(self, place: str) -> list[Machine]:
        """As often as it was measured."""
        return [parse_toml(found["machine"]) for found in self._found if found.get("at") == place]


def stepped(
    place: Place, one: Subject, options: argparse.Namespace
) -> dict[str, list[list[dict[str, Any]]]]:
    """What the ranks measured of each program, by its text, in each run of ranks.

    Memory, which does not depend on the run, is counted in the first.
    """
    rounds, seconds = -(-options.rounds // options.runs), options.steps_seconds / options.runs
    programs = list(dict.fromkeys(one.programs.values()))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "plans.json", Path(folder) / "measured.json"
        given.write_text(json.dumps(programs))
        arguments = ["--model", one.name, "--plans", str(given), "--out", str(out)]
        arguments += ["--rounds", str(rounds), "--seconds", str(seconds)]
        arguments += [] if one.batch is None else ["--batch", str(one.batch)]
        for number in range(options.runs):
            more = ["--order", str(number), *(["--count-memory"] if number == 0 else [])]
            place.run("benchmarks.estimates.worker", *arguments, *more, seconds=4 * seconds)
            runs.append(json.loads(out.read_text()))
    return {
        program: [[rank[i] for rank in run] for run in runs] for i, program in enumerate(programs)
    }


def take(
    place: Place,
    models: list[str],
    log: Log,
    options: argparse.Namespace,
    end: float,
    make: Make = searched,
) -> None:
    """All rows of one place that are not there yet; after `end` no model is begun."""
    if time.monotonic() > end:
        _fail(log, place, "every model", f"no time was left of {options.minutes:g} minutes")
        return
    before: Machine | None = None
    for name in models:
        if any((one.place, one.model) == (place.name, name) for one in log.rows):
            continue
        if time.monotonic() > end:
            _fail(log, place, name, f"no time was left of {options.minutes:g} minutes")
            continue
        best: list[Row] = []
        for times in range(1, options.times + 1):
            before = before or _measured(place, log, options.seconds)
            if before is None:
                return
            try:
                found, before = _rows(place, name, log, before, options, make)
            except Exception as e:  # noted, and the next one may do better
                first, *more = f"{type(e).__name__}: {e}".splitlines()
                _fail(log, place, name, first)
                print(*more, sep="\n", file=sys.stderr, flush=True)
                before = None
                break
            print(*found, f"unrest {unrest(found):.0%}", sep="\n", flush=True)
            best = min(best or found, found, key=unrest)
            best = [replace(one, times=times) for one in best]
            if unrest(best) <= UNREST or time.monotonic() > end:
                break
        for one in best:
            log.add({"row": asdict(one)})


def _rows(
    place: Place,
    name: str,
    log: Log,
    before: Machine,
    options: argparse.Namespace,
    make: Make,
) -> tuple[list[Row], Machine]:
    """One model's, by the machine `before` its steps and by that after them, which comes second."""
    one = make(name, before, options.operators_seconds)
    runs = stepped(place, one, options)
    after = _measured(place, log, options.seconds)
    if after is None:
        raise RuntimeError("the machine could not be measured after the steps")
    again = one.again(after, options.operators_seconds)
    steps = dict(zip(runs, paced([slower(run) for run in runs.values()]), strict=True))
    rows = []
    for title, plan in one.plans.items():
        program = one.programs[title]
        both = plan, again[title]
        rows.append(row(place.name, name, title, both, runs[program], steps[program]))
    return rows, after


def _measured(place: Place, log: Log, seconds: float) -> Machine | None:
    """The machine, if it could be measured."""
    try:
        machine = place.machine(seconds)
    except Exception as e:  # noted: what was measured before stays
        _fail(log, place, "the machine", f"{type(e).__name__}: {e}".splitlines()[0])
        return None
    for doubt in machine.measured.doubts if machine.measured else ():
        warn(f"{place.name}: {doubt}")
    log.add({"at": place.name, "machine": to_toml(machine)})
    return machine


def _fail(log: Log, place: Place, name: str, why: str) -> None:
    print(f"{name} on {place.name}: {why}", file=sys.stderr, flush=True)
    log.add({"failure": f"{name} on {place.name}: {why}", "of": [place.name, name]})


def result(log: Log) -> dict[str, Any]:
    """All that is known, for the page and the record."""
    places = list(dict.fromkeys(one.place for one in log.rows))
    by_place = {name: [one for one in log.rows if one.place == name] for name in places}
    peaks = {
        name: [machine.device.peak_flop_per_s("float32") for machine in log.machines(name)]
        for name in places
    }
    return {
        "rows": [asdict(one) for one in log.rows],
        "summary": {name: summary(rows) for name, rows in by_place.items()},
        "failures": log.failures,
        "machines": {name: to_toml(log.machines(name)[0]) for name in places},
        "peaks_measured": peaks,
    }


def main() -> None:
    """Measure, compare, write."""
    options = _options()
    log = Log(options.output.with_suffix(".rows"), options.fresh)
    if options.parts:
        for kind in KINDS:
            models = [name for name in options.models if name in kind.models]
            take(kind.place, models, log, options, options.end, kind.subject)
    else:
        _take_whole_batches(log, options)
    if not log.rows:
        sys.exit(f"nothing could be measured: {'; '.join(log.failures)}")
    found = {"parts": options.parts, **result(log)}
    record.write(found, options.output, SEED, tuned=record.TUNE_HOST)
    if options.page:
        options.page.write_text(page.written())


def _take_whole_batches(log: Log, options: argparse.Namespace) -> None:
    """The chosen plans and the baselines, on one host and on two."""
    remote = [name for name in options.models if name in REMOTE and not options.quick]
    later = REMOTE_SECONDS * len(remote)
    take(Local(), options.models, log, options, options.end - later)
    with ExitStack() as stack:
        try:
            place = stack.enter_context(two_hosts(REMOTE_BIT_PER_S)) if remote else None
        except HostsUnavailableError as e:
            log.add({"failure": f"two hosts: {e}", "of": ["two hosts", ""]})
            place = None
        if place is not None:
            take(place, remote, log, options, options.end)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="also write the page of all committed results")
    parser.add_argument(
        "--parts", action="store_true", help="micro-batches, stages and sharded replicas instead"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each plan, at most")
    parser.add_argument("--seconds", type=float, help="to measure a machine")
    parser.add_argument("--steps-seconds", type=float, help="for a model's steps")
    parser.add_argument("--operators-seconds", type=float, help="to time operators; 0: none are")
    parser.add_argument("--runs", type=int, help="of ranks, which start anew")
    parser.add_argument("--times", type=int, help="to measure a model, at most")
    parser.add_argument("--minutes", type=float, default=40.0, help="then no model is begun")
    parser.add_argument("--quick", action="store_true", help="four models, few steps, one host")
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    options = parser.parse_args()
    for name, value in _defaults(options).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.quick:
        options.rounds = min(options.rounds, 5)
    if options.parts and (others := sorted(set(options.models) - set(BATCHES))):
        parser.error(f"no steps in parts of {', '.join(others)}; there are {', '.join(BATCHES)}")
    options.end = time.monotonic() + 60 * options.minutes
    return options


def _defaults(options: argparse.Namespace) -> dict[str, Any]:
    """Values of the options that were not given."""
    names = ("seconds", "steps_seconds", "operators_seconds", "runs", "times")
    if options.quick:
        models = ["mlp"] if options.parts else list(QUICK)
        return {**dict(zip(names, (6.0, 6.0, 5.0, 3, 1), strict=True)), "models": models}
    if options.parts:
        return {**dict(zip(names, (8.0, 20.0, 5.0, 2, 1), strict=True)), "models": list(BATCHES)}
    return {**dict(zip(names, (12.0, 36.0, 10.0, 3, 2), strict=True)), "models": list(MODELS)}


if __name__ == "__main__":
    main()
