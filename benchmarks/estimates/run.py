"""Predicted against measured: step time and peak memory of four plans for each of ten models.

    python -m benchmarks.estimates.run -o benchmarks/estimates/result.json --page docs/estimates.md
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
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.estimates import page
from benchmarks.estimates.models import MODELS
from benchmarks.estimates.places import Local, Place, two_hosts
from benchmarks.estimates.rows import Row, paced, row, slower, summary, unrest
from benchmarks.estimates.worker import SEED
from benchmarks.hosts import HostsUnavailableError
from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Plan
from shardwright.machine.calls import OpCall
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.model import Machine
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.planner.recost import recosted
from shardwright.planner.tables.hot_ops import hot_calls
from shardwright.profile.local_ranks import silent
from shardwright.profile.op_timings import with_timings
from shardwright.profile.timing_cache import TimingCache
from shardwright.rules.analysis import analyze

BASELINES = ("data parallel", "fully sharded", "tensor parallel")
REMOTE, REMOTE_BIT_PER_S = ("mlp", "vgg", "gpt2"), 1e9
REMOTE_SECONDS = 110.0  # for each of them
UNREST = 0.12
RUNS = 3
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


def _program(plan: Plan) -> Plan:
    """`plan` without what is only said of it."""
    none = Seconds(0.0)
    return replace(plan, name="", notes=(), step_seconds=none, lower_bound_seconds=none)


@dataclass(frozen=True)
class Subject:
    """A model with the plans that are compared, and the calls that are timed for them."""

    name: str
    graph: Graph
    frontier: Frontier
    plans: dict[str, Plan]
    calls: tuple[OpCall, ...]

    @cached_property
    def programs(self) -> dict[str, str]:
        """Of every plan the text of the program that runs: equal plans have one."""
        return {title: plan_to_json(_program(plan)) for title, plan in self.plans.items()}

    def again(self, machine: Machine, seconds: float) -> dict[str, Plan]:
        """The same plans by what a machine is now, its operators timed anew."""
        machine = _timed(machine, self.calls, seconds)
        return {
            title: recosted(plan, self.graph, machine, plan.optimizer, self.frontier)
            for title, plan in self.plans.items()
        }


def subject(name: str, machine: Machine, seconds: float) -> Subject:
    """The chosen plan and the baselines of `BASELINES`, as `plan --machine here` makes them.

    Operators that dominate are timed at their local sizes, for about `seconds` in all.
    """
    torch.manual_seed(SEED)
    model, batch = MODELS[name]()
    graph = sw.capture(model, (), batch)
    frontier = sw.search(graph, machine)
    calls: tuple[OpCall, ...] = ()
    if seconds:
        calls = tuple(hot_calls(graph, analyze(graph), (*frontier, *frontier.baselines)))
        frontier = sw.search(graph, _timed(machine, calls, seconds))
    known = {plan.name: plan for plan in frontier.baselines}
    compared = {name: frontier.settled(known[name]) for name in BASELINES if name in known}
    return Subject(name, graph, frontier, {"chosen": frontier.fastest(), **compared}, calls)


def _timed(machine: Machine, calls: Sequence[OpCall], seconds: float) -> Machine:
    """`machine` with timings of `calls`, none of which is remembered from before."""
    with tempfile.TemporaryDirectory() as folder:
        known = TimingCache(Path(folder) / "timings.sqlite", _warn)
        return with_timings(machine, calls, seconds, known, silent) if seconds else machine


def stepped(
    place: Place, one: Subject, options: argparse.Namespace
) -> dict[str, list[list[dict[str, Any]]]]:
    """What the ranks measured of each program, by its text, in each of `RUNS`."""
    rounds, seconds = -(-options.rounds // RUNS), options.steps_seconds / RUNS
    programs = list(dict.fromkeys(one.programs.values()))
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "plans.json", Path(folder) / "measured.json"
        given.write_text(json.dumps(programs))
        arguments = ["--model", one.name, "--plans", str(given), "--out", str(out)]
        arguments += ["--rounds", str(rounds), "--seconds", str(seconds)]
        for number in range(RUNS):
            order = ["--order", str(number)]
            place.run("benchmarks.estimates.worker", *arguments, *order, seconds=4 * seconds)
            runs.append(json.loads(out.read_text()))
    return {
        program: [[rank[i] for rank in run] for run in runs] for i, program in enumerate(programs)
    }


def take(
    place: Place, models: list[str], log: Log, options: argparse.Namespace, end: float
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
                found, before = _rows(place, name, log, before, options)
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
    place: Place, name: str, log: Log, before: Machine, options: argparse.Namespace
) -> tuple[list[Row], Machine]:
    """One model's, by the machine `before` its steps and by that after them, which comes second."""
    one = subject(name, before, options.operators_seconds)
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
        _warn(f"{place.name}: {doubt}")
    log.add({"at": place.name, "machine": to_toml(machine)})
    return machine


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


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
    if not log.rows:
        sys.exit(f"nothing could be measured: {'; '.join(log.failures)}")
    record.write(result(log), options.output, SEED, tuned=record.TUNE_HOST)
    if options.page:
        options.page.write_text(page.written(options.output))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="also write the table as Markdown")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each plan, at most")
    parser.add_argument("--seconds", type=float, default=12.0, help="to measure a machine")
    parser.add_argument("--steps-seconds", type=float, default=36.0, help="for a model's steps")
    parser.add_argument(
        "--operators-seconds", type=float, default=10.0, help="to time operators; 0: none are"
    )
    parser.add_argument("--times", type=int, default=2, help="to measure a model, at most")
    parser.add_argument("--minutes", type=float, default=40.0, help="then no model is begun")
    parser.add_argument("--quick", action="store_true", help="four models, few steps, one host")
    parser.add_argument("--fresh", action="store_true", help="measure all again")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.times = min(options.rounds, 5), 1
        options.seconds = options.steps_seconds = 6.0
        options.operators_seconds = min(options.operators_seconds, 5.0)
    options.models = options.models or list(QUICK if options.quick else MODELS)
    options.end = time.monotonic() + 60 * options.minutes
    return options


if __name__ == "__main__":
    main()
