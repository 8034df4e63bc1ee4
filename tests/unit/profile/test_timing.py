import time

import pytest
import torch
import torch.distributed as dist

from shardwright.profile import host_load, timing
from shardwright.profile.host_load import HostLoad
from shardwright.profile.timing import ARRIVAL_SKEW, RepeatTimes, Sample, Stopwatch, quietest_rounds

STAT = "cpu {0} 0 0 9 0 0 0 0 0 0\ncpu0 {0} 0 0 9 0 0 0 0 0 0\ncpu7 9 9 9 9 9 9 9 9 9 9\nintr 1 2\n"


@pytest.mark.parametrize(
    "busy, kept",
    [
        ([0.0, 0.05, 0.02], [0, 1, 2]),
        ([0.0, 0.9, 0.02, 0.3], [0, 2]),
        ([0.9, 0.0, 0.8, 0.7], [1, 3]),  # one quiet round is too few to believe alone
        ([0.9, 0.8], [1]),
    ],
)
def test_rounds_that_others_disturbed_do_not_count_where_there_are_others(busy, kept):
    assert quietest_rounds(busy) == kept


@pytest.mark.parametrize("ours, part", [(0.0, 0.5), (1.0, 0.25), (3.0, 0.0)])
def test_what_others_take_is_what_the_cores_did_without_us(ours, part, tmp_path, monkeypatch):
    clock = iter([100.0, 104.0])
    ticks = host_load.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(host_load.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    (tmp_path / "stat").write_text(STAT.format(10 * ticks))
    watched = HostLoad()
    (tmp_path / "stat").write_text(STAT.format(12 * ticks))  # one core, 2 of 4 seconds
    assert watched.used_by_others(ours) == part


def test_where_the_system_says_nothing_nothing_is_known_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "none")
    assert HostLoad().used_by_others(1.0) == 0.0


def beside(others, monkeypatch):
    """Another rank, whose figures of all rounds are `others`."""

    def gathered(every, own):
        every[:] = [own, (others, own[1])]

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gathered)


@pytest.mark.parametrize(
    "alone, times, seconds",
    [
        (False, 1, 9.0),  # ranks that wait for each other take as long as the later one
        (True, 1, 5.0),  # two that compute are disturbed at different times
        (True, 5, 1.0),
    ],
)
def test_the_noise_of_two_ranks_does_not_count_twice(alone, times, seconds, monkeypatch):
    others = [[RepeatTimes(9.0, 9.0)], [RepeatTimes(5.0, 5.0)], [RepeatTimes(4.0, 4.0)]]
    mine = [[RepeatTimes(5.0, 5.0)], [RepeatTimes(9.0, 9.0)], [RepeatTimes(4.0, 4.0)]]
    beside(others, monkeypatch)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    stopwatch.add("product", 8, torch.zeros, alone=alone, times=times)
    (sample,) = stopwatch._over_ranks(mine, [0.0] * 3)
    assert (sample.work, sample.seconds) == (8, seconds)


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_has_its_share_of_what_is_slow_now_and_then(alone, monkeypatch):
    """The mean of several; what comes before does not count."""
    took = iter([1.0, 2.0, 9.0])
    done = []
    monkeypatch.setattr(dist, "barrier", lambda: None)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    monkeypatch.setattr(stopwatch, "once", lambda run, alone: done.append(alone) or next(took))
    stopwatch.add("sum", 8, torch.zeros, alone=alone)
    assert stopwatch._round(stopwatch._probes[0], 3) == RepeatTimes(4.0, 1.0)
    assert done == [alone] * 3


def test_of_a_wait_counts_what_follows_the_last_rank(monkeypatch):
    """It came as last the second time, and waited half a second and three for the other."""
    took = iter([2.0, 1.0, 4.0, 1.5, 3.0, 4.0])  # before, and what is timed, in turn

    def slowest(x, op):
        assert op == dist.ReduceOp.MAX
        x.copy_(torch.maximum(x, torch.tensor([2.5, 2.0, 6.0])))

    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", slowest)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    monkeypatch.setattr(stopwatch, "once", lambda run, alone=False: next(took))
    stopwatch.add("sum", 8, torch.zeros, after=torch.zeros)
    found = stopwatch._round(stopwatch._probes[0], 3)
    assert found == RepeatTimes((0.5 + 1.5 + 1.0) / 3, 1.0, (2.0, 4.0, 3.0))


def test_what_only_computes_is_late_for_nobody(monkeypatch):
    took = iter([2.0, 1.0, 4.0, 3.0])  # before, and what is timed, in turn
    monkeypatch.setattr(dist, "barrier", lambda: None)
    beside([[RepeatTimes(1.0, 1.0)]] * 3, monkeypatch)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    monkeypatch.setattr(stopwatch, "once", lambda run, alone=False: next(took))
    stopwatch.add("parameter", 2, torch.zeros, alone=True, after=torch.zeros)
    rounds = [[stopwatch._round(stopwatch._probes[0], 2)]] * 3
    assert stopwatch._over_ranks(rounds, [0.0] * 3) == [Sample("parameter", 2, 2.0)]


def drifting(mine, others, monkeypatch, busy=0.0):
    """The samples `APART` of three rounds in which ranks computed so long before their sums."""
    beside([[RepeatTimes(1.0, 1.0, tuple(took))] for took in others], monkeypatch)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    stopwatch.add("sum", 8, torch.zeros, after=torch.zeros)
    rounds = [[RepeatTimes(1.0, 1.0, tuple(took))] for took in mine]
    first, *apart = stopwatch._over_ranks(rounds, [busy] * 3)
    assert first == Sample("sum", 8, 1.0)
    return apart


def test_what_ranks_wait_for_the_last_is_a_sample_of_its_own(monkeypatch):
    mine = [[4.0] * 6] * 3
    others = [[4.0 - early] * 6 for early in (1.0, 1.5, 8.0)]
    assert drifting(mine, others, monkeypatch) == [Sample(ARRIVAL_SKEW, 3.25, 0.75)]
    (least,) = drifting(mine, others, monkeypatch, busy=0.5)
    assert least.seconds == 0.5  # noise only adds


def test_what_makes_ranks_late_adds_up_until_they_meet(monkeypatch):
    """One that is slower all the time is late by twice as much; who takes turns is not."""
    is_past = drifting([[3.0] * 13] * 3, [[1.0] * 13] * 3, monkeypatch)
    assert is_past == [Sample(ARRIVAL_SKEW, 2.0, 1.0), Sample(ARRIVAL_SKEW, 4.0, 2.0)]
    turns = drifting([[3.0, 1.0] * 6] * 3, [[1.0, 3.0] * 6] * 3, monkeypatch)
    assert turns == [Sample(ARRIVAL_SKEW, 2.0, 1.0), Sample(ARRIVAL_SKEW, 4.0, 0.0)]


def test_what_runs_too_rarely_says_nothing_of_how_late_ranks_are(monkeypatch):
    assert drifting([[3.0] * 5] * 3, [[1.0] * 5] * 3, monkeypatch) == []


def test_of_waits_after_computing_the_mean_of_the_ranks_counts(monkeypatch):
    """The later one hardly waits, and which one it is changes."""
    mine, others = [[RepeatTimes(1.0, 1.0)]] * 3, [[RepeatTimes(5.0, 5.0)]] * 3
    beside(others, monkeypatch)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    stopwatch.add("sum", 8, torch.zeros, after=torch.zeros)
    (sample,) = stopwatch._over_ranks(mine, [0.0] * 3)
    assert sample.seconds == 3.0


@pytest.mark.parametrize(
    "others, crowd",
    [
        ([("here", {0, 1})], 1.0),
        ([("here", {0, 1})] * 3, 2.0),  # four ranks on two cores
        ([("there", {0, 1})] * 3, 1.5),  # three of another host
        ([("here", {2}), ("here", {2})], 2.0),
        ([("here", set())], 1.0),  # where the system does not tell
    ],
)
def test_ranks_that_are_more_than_cores_have_parts_of_one(others, crowd, monkeypatch):
    def gathered(every, own):
        every[:] = [own, *((host, frozenset(where)) for host, where in others)]

    monkeypatch.setattr(timing.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(timing, "cores", lambda: {0, 1})
    monkeypatch.setattr(dist, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    assert timing.ranks_of_a_core() == crowd


@pytest.mark.parametrize("alone, seconds", [(True, 10.0), (False, 5.0)])
def test_what_a_thread_computes_takes_longer_where_two_share_its_core(alone, seconds, monkeypatch):
    """Its own clock stands still while the other has the core; a clock on the wall does not."""
    rounds = [[RepeatTimes(5.0, 5.0)], [RepeatTimes(9.0, 9.0)], [RepeatTimes(4.0, 4.0)]]

    def gathered(every, own):
        every[:] = [own] * len(every)

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(timing, "cores", lambda: {0})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    stopwatch = Stopwatch("cpu", 1.0, lambda what, part: None)
    stopwatch.add("product", 8, torch.zeros, alone=alone)
    (sample,) = stopwatch._over_ranks(rounds, [0.0] * 3)
    assert sample.seconds == seconds
