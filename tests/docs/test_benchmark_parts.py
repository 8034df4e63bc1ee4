"""Parts of the benchmarks that no run on this machine shows: pages, what is kept, what is told."""

import json
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwright as sw
from benchmarks import quick
from benchmarks.estimates import places
from benchmarks.estimates import run as estimates
from benchmarks.estimates.page import written
from benchmarks.estimates.rows import Row, order, order_of_runs, paced, row, slower, summary, unrest
from benchmarks.micro_batches import page as commits_page
from benchmarks.micro_batches import run as commits
from benchmarks.soybean import run as soybean
from benchmarks.soybean.worker import Subject, Task, measured_file
from benchmarks.tensoropt import page as tensoropt
from benchmarks.tensoropt import run as limits
from shardwright.ir.layout import Seconds
from shardwright.ir.timeline import Stream, Timeline, Track
from shardwright.ir.timeline import Task as Planned
from shardwright.machine.presets import preset

MIB = 2**20


def test_under_limits_a_row_shows_times_and_failures():
    outcomes = {
        "DistributedDataParallel": limits.Outcome(failed="out of memory"),
        "fully_shard": limits.Outcome(0.25),
        "ours": limits.Outcome(0.125),
    }
    row = limits.Row(2, 84 * MIB, outcomes, 83 * MIB, 0.1)
    frontier = [{"step_seconds": 1.0, "peak_bytes": 190 * MIB}]
    result = {"rows": [asdict(row)], "frontiers": {"2": frontier}, "allowance_bytes": 12 * MIB}
    assert "| 2 | 84 | out of memory | 250 | 125 | 83 |" in tensoropt.body(result).splitlines()
    assert str(row).endswith(
        "DistributedDataParallel out of memory, fully_shard 250 ms, ours 125 ms"
    )


def test_limits_fall():
    for asked in (*limits.LIMITS_MIB.values(), *limits.QUICK.values()):
        assert list(asked) == sorted(asked, reverse=True)


ROW = soybean.Row(
    **asdict(Subject("alexnet", 0.5, 64)),
    hosts=4,
    bit_per_s=1e8,
    commit="here",
    rounds=3,
    mesh="dp=4",
    predicted_seconds=0.25,
    seconds={"ours": 0.5},
    ratios={"DDP": (1.0, 2.0, 3.0)},
)


def test_rows_of_this_commit_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(soybean.record, "commit", lambda: "here")
    file = tmp_path / "result.json"
    assert soybean._known(file) == ([], {})
    other = replace(ROW, commit="another")
    rows = [asdict(ROW), asdict(other)]
    file.write_text(json.dumps({"rows": rows, "measured_machines": {"4 hosts": "toml"}}))
    (kept,), machines = soybean._known(file)
    assert kept.subject == ROW.subject and machines == {"4 hosts": "toml"}
    file.write_text(json.dumps({"rows": rows[1:], "measured_machines": {"4 hosts": "toml"}}))
    assert soybean._known(file) == ([], {})


def test_what_ranks_are_to_measure_comes_back_from_its_file(tmp_path):
    subjects = (Subject("mlp", 0.125, 128), Subject("vgg16", 0.125, 8))
    task = Task(subjects, ("{}", "{}"), ("DDP",), seconds=1.0, least=3, until=2.5)
    task.write(tmp_path / "task.json")
    assert Task.read(tmp_path / "task.json") == task
    assert measured_file(tmp_path / "task.json", 1).name == "task.json.1"


def test_small_versions_are_of_benchmarks_that_exist():
    assert all((quick.ROOT / "benchmarks" / name / "run.py").exists() for name in quick.QUICK)


def test_two_halves_run_every_small_version_once(monkeypatch):
    names = []
    monkeypatch.setattr(quick, "ran", lambda name: names.append(name) or "")
    for part in ("1/2", "2/2"):
        monkeypatch.setattr(quick.sys, "argv", ["quick", "--part", part])
        quick.main()
    assert sorted(names) == sorted(quick.QUICK)


@pytest.fixture
def instead(tmp_path, monkeypatch):
    """A shell script that runs instead of a benchmark."""

    def run(script):
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o700)
        monkeypatch.setattr(quick.sys, "executable", str(tmp_path / "python"))

    return run


def test_a_small_version_that_fails_is_told(instead, capsys):
    instead("exit 3")
    assert quick.ran("tapas") == "tapas ended with status 3"
    assert "=== tapas: -m benchmarks.tapas.run --quick" in capsys.readouterr().out
    instead("exit 0")
    assert quick.ran("tapas") == ""


def test_a_small_version_ends_in_time(instead, monkeypatch):
    monkeypatch.setattr(quick, "LIMIT_SECONDS", 0.05)
    instead("exec sleep 60")
    assert quick.ran("tapas") == "tapas took more than 0.05 s"


def _plan_rows(spread):
    times = {"chosen": (1.0, 1.08), "a": (1.1, 1.02), "b": (1.2, 2.0), "c": (1.3, 1.5)}
    return [
        Row("here", "toy", plan, "dp=2", *both, spread, 1.0, 1.0, 1, 1, 25, 0.0, 0.0)
        for plan, both in times.items()
    ]


@pytest.mark.parametrize(
    "spread, told, unbeaten", [(0.01, (6, 6, 4), 0), (0.15, (6, 5, 4), 1), (9.0, (6, 0, 0), 1)]
)
def test_only_pairs_of_plans_that_noise_leaves_apart_are_judged(spread, told, unbeaten):
    found = summary(_plan_rows(spread))
    assert (found["pairs"], found["pairs_apart"], found["pairs_apart_in_order"]) == told
    assert found["chosen_within_5_percent"] == 0
    assert found["chosen_within_noise"] == unbeaten


def test_runs_of_ranks_are_held_against_each_other():
    rows = _plan_rows(0.01)
    assert order_of_runs(rows) is None
    runs = [(1.0, 1.0), (2.0, 2.0), (3.0, 4.0), (4.0, 3.0)]
    rows = [replace(one, of_runs=both) for one, both in zip(rows, runs, strict=True)]
    assert order_of_runs(rows) == pytest.approx(0.8)
    assert summary(rows)["mean_spearman_of_runs"] == pytest.approx(0.8)
    assert order_of_runs([rows[0], rows[0]]) is None  # one and the same


def test_steps_are_compared_within_rounds():
    """A round in which the host is slow says nothing of the plan that took most of it."""
    usual, pace = (1.0, 1.5, 3.0), [1.0, 2.0, 1.0, 1.25, 0.5]
    plans = [[[took * p for p in pace[:2]], [took * p for p in pace[2:]]] for took in usual]
    for took, runs in zip(usual, paced(plans), strict=True):
        assert [len(run) for run in runs] == [2, 3]
        assert runs == [pytest.approx([took] * len(run)) for run in runs]
    plans[1][1][0] *= 1.25  # what one plan takes longer stays its own
    (first, _), (_, second), (third, _) = paced(plans)
    assert first == pytest.approx([1.0, 1.0]) and third == pytest.approx([3.0, 3.0])
    assert second == pytest.approx([1.5 * 1.25, 1.5, 1.5])


def test_a_row_is_what_the_slower_rank_took_at_the_usual_pace():
    took = [[1.0, 4.0, 1.0], [2.0, 2.0, 2.0]]
    ranks = [
        {"seconds": seconds, "thread_seconds": seconds, "bytes": 7 + i, "busy": 0.1 * i}
        for i, seconds in enumerate(took)
    ]
    assert slower([ranks, ranks]) == [[2.0, 4.0, 2.0]] * 2
    parts = {"ops": (), "parameters": (), "pipeline": None}
    plan = SimpleNamespace(mesh="dp=2", step_seconds=1.5, peak_bytes=8, **parts)
    again = SimpleNamespace(step_seconds=3.0, **parts)
    found = row("here", "toy", "a", (plan, again), [ranks], [[2.0, 2.5, 2.0]])
    assert (found.measured_seconds, found.predicted_seconds, found.drift) == (2.0, 2.25, 1.0)
    assert (found.spread, found.paced_spread) == pytest.approx((1.0, 0.25))
    assert (found.measured_bytes, found.steps, found.of_runs) == (8, 3, (2.0,))
    assert found.noise < replace(found, paced_spread=None).noise


def test_of_a_pipeline_the_group_that_computes_longest_counts():
    """Not what all groups compute, nor waits and messages."""
    lengths = {"rank 0": (1.0, 2.0), "rank 1": (0.5, 4.0)}
    tasks = [
        Planned("", Track(ranks, Stream.COMPUTE), Seconds(seconds))
        for ranks, both in lengths.items()
        for seconds in both
    ]
    tasks.append(Planned("", Track("rank 0", Stream.COMPUTE), Seconds(9.0), idle=True))
    tasks.append(Planned("", Track("rank 0", Stream.COMMUNICATION, "pp"), Seconds(9.0)))
    timeline = Timeline(tuple(tasks), (Seconds(0.0),) * len(tasks))
    plan = SimpleNamespace(
        mesh="pp=2", step_seconds=1.0, peak_bytes=8, pipeline="1F1B", timeline=timeline
    )
    ranks = [{"seconds": [1.0, 2.0], "thread_seconds": [1.0], "bytes": 8, "busy": 0.0}]
    found = row("here", "toy", "1F1B", (plan, plan), [ranks], [[1.0, 2.0]])
    assert found.predicted_compute == 4.5


def test_errors_of_steps_in_parts_are_shown_by_plan(tmp_path):
    one = Row("here", "toy", "HSDP", "dp=2", 1.1, 1.0, 0.1, 1.0, 1.0, 101, 100, 25, 0.0, 0.0)
    other = replace(one, model="other", predicted_seconds=0.8, predicted_bytes=100)
    rows = [one, other, replace(one, plan="1F1B", predicted_seconds=2.0, measured_seconds=2.0)]
    host = {"cores": 2, "processor": "none"}
    origin = {"command": "run", "commit": "c" * 40, "date": "today", "seed": 0, "machine": host}
    found = {"rows": [asdict(row) for row in rows], "summary": {"here": summary(rows)}}
    more = {"parts": True, "failures": [], "machines": {}, "peaks_measured": {}}
    (tmp_path / "parts.json").write_text(json.dumps({**origin, **found, **more}))
    lines = written(tmp_path).splitlines()
    assert "| HSDP | 2 | 15.0% | 20.0% | 0.5% | 1.0% |" in lines
    assert "| 1F1B | 1 | 0.0% | 0.0% | 1.0% | 1.0% |" in lines
    assert "* Peak memory: mean error 0.7%, worst 1.0% (asked: 2 %)." in lines


def test_steps_of_commits_are_compared_in_pairs():
    """A time at which the host is slow says nothing of either commit."""
    found = commits.row("toy", [2.0, 8.0, 3.0], [1.0, 4.0, 2.0])
    assert found["times_faster"] == 2.0 and found["quartiles"] == [1.75, 2.0]
    assert (found["before_seconds"], found["now_seconds"]) == (3.0, 2.0)
    result = {"before": "83c3193", "hosts": 2, "gbit_per_s": 1.0, "micro_batches": 4}
    result |= {"target": 1.5, "rows": [{**found, "link_seconds": 1.6}]}
    row = "| toy | 3000 | 2000 | 2.00 (1.75 to 2.00) | 1600 |"
    assert row in commits_page.body(result).splitlines()


def test_of_a_scattered_sum_each_rank_sends_the_parts_of_the_others():
    sent = {kind: commits.sent_part(kind, 4) for kind in ("reduce_scatter", "all_reduce", "slice")}
    assert sent == {"reduce_scatter": 0.75, "all_reduce": 1.5, "slice": 0.0}


def test_a_plan_that_is_chosen_and_known_runs_once():
    graph = sw.capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(4, 8),))
    frontier = sw.search(graph, preset("2xcpu"))
    (plan,) = (p for p in frontier.baselines if p.name == "data parallel")
    plan = frontier.settled(plan)  # with a timeline, whose end is the time of its step
    other = next(p for p in frontier.baselines if p.name != "data parallel")
    same = replace(plan, name="pareto-0", notes=("fast",), lower_bound_seconds=Seconds(0.0))
    plans = {"chosen": same, "data parallel": plan, "other": other}
    programs = estimates.Subject("toy", graph, frontier, plans, ()).programs
    assert programs["chosen"] == programs["data parallel"] != programs["other"]
    assert sw.Plan.from_json(programs["chosen"]).ops == plan.ops


def test_a_plan_that_is_there_twice_is_ranked_once():
    rows = _plan_rows(0.01)
    assert order(rows) < 0.7
    twice = [replace(rows[0], predicted_seconds=1.1, measured_seconds=0.9), *rows[1:]]
    # By the mean of both, 0.96, the plan comes first; b and c are in the wrong order.
    assert order(twice) == pytest.approx(0.5)
    alone = [replace(rows[0], measured_seconds=t) for t in (1.0, 2.0)]
    assert order(alone) == 1.0


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["[rank1]: ValueError: odd", "torch.distributed...ChildFailedError: "], "odd"),
        (["[rank0]:   in f", "DistNetworkError: in use", "and more"], "in use"),
        (["ChildFailedError: ", "[0]:", "  exitcode  : -6 (pid: 9)"], "exitcode  : -6 (pid: 9)"),
        (["RuntimeError: no peer", "  raise ChildFailedError(", "x.ChildFailedError: "], "no peer"),
        (["killed"], "killed"),
        ([], "said nothing"),
    ],
)
def test_a_rank_says_why_it_failed(lines, reason):
    assert places._reason(lines).endswith(reason)


@pytest.mark.parametrize(
    "unrests, kept, times",
    [((0.05,), 0.05, 1), ((0.3, 0.1), 0.1, 2), ((0.3, 0.2, 0.25), 0.2, 3)],
)
def test_a_model_is_measured_until_it_is_quiet_whatever_was_predicted(
    unrests, kept, times, tmp_path, monkeypatch
):
    """The quietest time counts, also where its error is the largest."""
    made = iter(unrests)

    def rows(place, name, log, before, options, make):
        one = next(made)
        first, second, *_ = (replace(row, model=name) for row in _plan_rows(one))
        first = replace(first, drift=-one / 2, predicted_seconds=1 / one)
        return [first, replace(second, spread=0.0, drift=-one)], before

    place = SimpleNamespace(name="here", machine=lambda seconds: preset("2xcpu"))
    monkeypatch.setattr(estimates, "_rows", rows)
    log = estimates.Log(tmp_path / "rows", fresh=True)
    options = SimpleNamespace(times=3, seconds=1.0, minutes=1.0)
    estimates.take(place, ["mlp"], log, options, time.monotonic() + 60)
    assert [one.times for one in log.rows] == [times] * 2
    assert unrest(log.rows) == pytest.approx(kept)
    assert log.rows[0].predicted_seconds == 1 / kept
    assert summary(log.rows)["measured_again"] == {"mlp": times}
