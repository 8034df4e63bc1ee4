"""Times operations on all ranks together, robustly against noise.

All probes are timed in several rounds, so that a temporary disturbance affects one round of many
probes and not all samples of one. Rounds in which other programs used much of the cores are dropped
where enough rounds remain. Work of one CPU thread is timed by the thread's own clock, which stops
while another program has the core; where there are more ranks than cores, ranks share a core.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple, final

import numpy as np
import torch
import torch.distributed as dist

from shardwright.profile.host_load import HostLoad, cores

ROUNDS = 6
_LEAST_ROUNDS = 3  # even after the time limit: of two rounds no outlier can be found
_MOST_REPEATS = 200  # repeats in one round
_QUIET = 0.1  # others' part of the cores
_LEAST_STRETCHES = 6  # stretches of a round from which the skew of ranks is computed

# Kind of samples: after `work` seconds of computing a rank waits `seconds` for the slowest.
ARRIVAL_SKEW = "apart"


class RepeatTimes(NamedTuple):
    """Statistics of the repeats in one round, in seconds.

    They are the median and the first decile, and, where the operation before it makes ranks late,
    the seconds of that operation in each repeat.
    """

    usual: float
    low: float
    before: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` that `work` of a kind took: FLOP, bytes of memory, or bytes of the local tile."""

    kind: str
    work: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Probe:
    kind: str
    work: float
    run: Callable[[], object]
    alone: bool  # whether it waits for no other rank
    times: int  # repeats of the sample's work in one run
    after: Callable[[], object] | None  # runs before it and is not timed

    @property
    def drifts(self) -> bool:
        """Whether the operation before the probe makes ranks late."""
        return self.after is not None and not self.alone


@final
class Stopwatch:
    """Times probes in turn, for about `seconds` in all.

    All ranks of the process group add the same probes and run them equally often. `tell` is called
    with the current probe and the part that is done.
    """

    def __init__(self, kind: str, seconds: float, tell: Callable[[str, float], None]) -> None:
        self.device = torch.device(kind)
        self.busy = 0.0  # others' part of the cores, in the rounds that count
        self._seconds = seconds
        self._tell = tell
        self._probes: list[_Probe] = []

    def add(
        self,
        kind: str,
        work: float,
        run: Callable[[], object],
        *,
        alone: bool = False,
        times: int = 1,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Add a probe that times `run`, which repeats its work `times` times; the sample is of one.

        With `alone` the probe only computes and waits for no other rank. `after` runs before it and
        is not timed. Where `run` waits for other ranks, `after` makes some ranks later than others:
        then the time counts from the arrival of the last rank, as the mean over ranks, and the
        waits for that rank become samples `ARRIVAL_SKEW`.
        """
        self._probes.append(_Probe(kind, work, run, alone, times, after))

    def samples(self) -> list[Sample]:
        """One sample per probe, of the slowest rank, then the samples `ARRIVAL_SKEW`.

        They are equal on every rank.
        """
        end = time.monotonic() + self._seconds
        repeats = self._repeats()
        rounds: list[list[RepeatTimes]] = []
        busy: list[float] = []
        while len(rounds) < ROUNDS and not (len(rounds) >= _LEAST_ROUNDS and self.is_past(end)):
            self._tell("round " + str(len(rounds) + 1), 0.25 + 0.75 * len(rounds) / ROUNDS)
            neighbours, ours = HostLoad(), time.process_time()
            rounds.append([self._round(*one) for one in zip(self._probes, repeats, strict=True)])
            busy.append(neighbours.used_by_others(of_these_cores(time.process_time() - ours)))
        return self._over_ranks(rounds, busy)

    def once(self, run: Callable[[], object], *, alone: bool = False) -> float:
        """Seconds of one `run`, until the device has finished."""
        clock = self._clock(alone)
        self._wait()
        start = clock()
        run()
        self._wait()
        return clock() - start

    def _repeats(self) -> list[int]:
        """Repeats of each probe in a round, decided by rank 0."""
        share = self._seconds / ROUNDS / max(1, len(self._probes))
        found = []
        for place, probe in enumerate(self._probes):
            self._tell(probe.kind, 0.25 * place / len(self._probes))
            probe.run()  # the first runs do not count, while the heap still grows
        for probe in self._probes:
            seconds = self.once(probe.run, alone=probe.alone)
            if probe.after is not None:
                seconds += self.once(probe.after)
            found.append(int(share / max(seconds, 1e-7)))
        counts = torch.tensor(found, device=self.device)
        dist.broadcast(counts, 0)
        return [max(1, min(_MOST_REPEATS, count)) for count in counts.tolist()]

    def _round(self, probe: _Probe, repeats: int) -> RepeatTimes:
        dist.barrier()
        before, found = [], []
        for _ in range(repeats):
            if probe.after is not None:
                before.append(self.once(probe.after))
            found.append(self.once(probe.run, alone=probe.alone))
        if probe.drifts:
            early = self._waits_for_slowest(before)
            found = [max(0.0, took - lead) for took, lead in zip(found, early, strict=True)]
        # A step has many operations, some of which are slow at times: so the mean counts.
        low = sorted(found)[len(found) // 10]
        return RepeatTimes(fmean(found), low, tuple(before if probe.drifts else ()))

    def _waits_for_slowest(self, took: Sequence[float]) -> list[float]:
        """For each repeat, the seconds by which the slowest rank was slower than this one."""
        mine = torch.tensor(took, dtype=torch.float64, device=self.device)
        most = mine.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return (most - mine).tolist()

    def _over_ranks(
        self, rounds: Sequence[Sequence[RepeatTimes]], busy: Sequence[float]
    ) -> list[Sample]:
        every = [(rounds, busy)] * dist.get_world_size()
        dist.all_gather_object(every, (rounds, busy))
        loads = [max(loads) for loads in zip(*(busy for _, busy in every), strict=True)]
        kept = quietest_rounds(loads)
        self.busy = median(loads[number] for number in kept)
        quiet = self.busy <= _QUIET
        crowd = ranks_of_a_core()
        found = []
        for place, probe in enumerate(self._probes):
            figures = [[rounds[number][place] for number in kept] for rounds, _ in every]
            seconds = _of_ranks(figures, quiet, probe)
            if self._clock(probe.alone) is time.thread_time:
                seconds *= crowd
            found.append(Sample(probe.kind, probe.work, seconds / probe.times))
        drifts = [
            [[s for one in rounds[number] for s in one.before] for rounds, _ in every]
            for number in kept
        ]
        return [*found, *_arrival_skews(drifts, quiet)]

    def _clock(self, alone: bool) -> Callable[[], float]:
        thread = alone and self.device.type == "cpu" and torch.get_num_threads() == 1
        return time.thread_time if thread else time.perf_counter

    def is_past(self, end: float) -> bool:
        """Whether rank 0 is beyond `end`, of `time.monotonic`."""
        is_past = torch.tensor([float(time.monotonic() > end)], device=self.device)
        dist.broadcast(is_past, 0)
        return bool(is_past.item())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _of_ranks(figures: Sequence[Sequence[RepeatTimes]], quiet: bool, probe: _Probe) -> float:
    """One figure from the `figures` of every rank in every round.

    It is the usual time of the slowest rank, or the mean wait of a rank. Noise only ever adds: on a
    noisy host the least figure is the most accurate. Ranks that do not wait for others are slow at
    different times: their rounds are combined rank by rank first, or the result would have the
    noise of several ranks where a step has that of one.
    """
    weigh: Callable[[Sequence[float]], float] = median if quiet else min
    values = [[one.usual if quiet else one.low for one in rounds] for rounds in figures]
    if probe.alone:
        return max(weigh(rounds) for rounds in values)
    of_round = fmean if probe.drifts else max
    return weigh([of_round(ranks) for ranks in zip(*values, strict=True)])


def _arrival_skews(drifts: Sequence[Sequence[Sequence[float]]], quiet: bool) -> list[Sample]:
    """The mean wait for the slowest rank after one, two, four, ... units of computation.

    `drifts` are the seconds of each rank's computations, in order, for every round. Differences
    between ranks accumulate until they wait for each other; they are accumulated here over
    increasing numbers of computations.
    """
    weigh: Callable[[Sequence[float]], float] = median if quiet else min
    took = [np.array(ranks, np.float64) for ranks in drifts]  # (ranks, repeats) of each round
    found = []
    length = 1
    while all(one.shape[1] >= _LEAST_STRETCHES * length for one in took):
        rounds = []
        for one in took:
            stretches = one[:, : one.shape[1] // length * length]
            summed = stretches.reshape(len(one), -1, length).sum(axis=2)
            rounds.append((float(summed.mean()), float((summed.max(axis=0) - summed).mean())))
        seconds = median(before for before, _ in rounds)
        found.append(Sample(ARRIVAL_SKEW, seconds, weigh([early for _, early in rounds])))
        length *= 2
    return found


def ranks_of_a_core() -> float:
    """The largest number of ranks that share a core, at least 1; equal on every rank."""
    mine = (socket.gethostname(), frozenset(cores()))
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    crowds = [1.0]
    for host, where in every:
        sharing = [others for name, others in every if name == host and where & others]
        if sharing:
            crowds.append(len(sharing) / len(frozenset().union(*sharing)))
    return max(crowds)


def of_these_cores(seconds: float) -> float:
    """CPU seconds of all ranks that share cores with this one, which used `seconds`."""
    mine = (socket.gethostname(), frozenset(cores()), seconds)
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return sum(took for host, where, took in every if host == mine[0] and where & mine[1])


def quietest_rounds(busy: Sequence[float]) -> list[int]:
    """Indices of the rounds that count: all quiet ones, or the quieter half if few are quiet.

    >>> quietest_rounds([0.01, 0.5, 0.02, 0.03]), quietest_rounds([0.5, 0.9, 0.4, 0.6])
    ([0, 2, 3], [0, 2])
    """
    order = sorted(range(len(busy)), key=lambda number: busy[number])
    quiet = [number for number in order if busy[number] <= _QUIET]
    return sorted(quiet if 2 * len(quiet) >= len(busy) else order[: (len(busy) + 1) // 2])
