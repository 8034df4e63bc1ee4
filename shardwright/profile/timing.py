"""Times operations on all ranks at the same time, robustly against noise.

All probes are timed in several rounds, so that a temporary disturbance affects one round of many
probes and not all repeats of one. Rounds in which other programs used much of the cores are dropped
(`quietest_rounds`). Computation of one CPU thread is timed by the thread's own clock, which stops
while another program has the core; if ranks share a core, the time is multiplied by their number.
Computation on a GPU is timed behind kernels that keep it busy (`device_queue`).
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

from shardwright.profile.device_queue import CudaQueue, QueuedTimer
from shardwright.profile.host_load import HostLoad, cores

ROUNDS = 6
_LEAST_ROUNDS = 3  # even after the time limit: two rounds do not show which is an outlier
_MOST_REPEATS = 200  # repeats in one round
_QUIET = 0.1  # the largest part of the cores that others use in a quiet round
_LEAST_STRETCHES = 6  # runs of consecutive computations in a round for one sample of the skew

# The kind of samples with a mean wait of `seconds` for the slowest rank after `work` seconds of
# computation.
ARRIVAL_SKEW = "apart"


class RepeatTimes(NamedTuple):
    """Statistics of a probe's repeats in one round, in seconds.

    `usual` is their mean and `low` their first decile; of probes that drift `low` is the median.
    `before` has the time of the preceding operation in each repeat, if that makes ranks late
    (`_Probe.drifts`). `host` is what the host took to issue one on a GPU.
    """

    usual: float
    low: float
    before: tuple[float, ...] = ()
    host: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The `seconds` that some `work` of a `kind` took.

    Work is flop, bytes of memory traffic, bytes of a local tile, or a count, depending on the kind.
    """

    kind: str
    work: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Probe:
    kind: str
    work: float
    run: Callable[[], object]
    alone: bool  # whether it computes without waiting for other ranks
    times: int  # how often `run` does the work
    after: Callable[[], object] | None  # runs before each run and is not part of its time
    issued: tuple[str, float] | None  # kind and work of the sample of what the host takes

    @property
    def drifts(self) -> bool:
        """Whether ranks arrive at the probe at different times, because of `after`."""
        return self.after is not None and not self.alone


@final
class Stopwatch:
    """Times probes in turn, for about `seconds` in all.

    All ranks of the process group add the same probes and run them equally often.

    Args:
        kind: the type of device, `"cpu"` or `"cuda"`.
        seconds: the time for all probes.
        tell: called with the current probe or round, and the fraction that is done.
    """

    def __init__(self, kind: str, seconds: float, tell: Callable[[str, float], None]) -> None:
        self.device = torch.device(kind)
        self.busy = 0.0  # part of the cores that others used, the median of the rounds that count
        self._seconds = seconds
        self._tell = tell
        self._probes: list[_Probe] = []
        self._timer = QueuedTimer(CudaQueue()) if kind == "cuda" else None

    def add(
        self,
        kind: str,
        work: float,
        run: Callable[[], object],
        *,
        alone: bool = False,
        times: int = 1,
        after: Callable[[], object] | None = None,
        issued: tuple[str, float] | None = None,
    ) -> None:
        """Add a probe.

        Args:
            kind: the kind of its sample.
            work: the work of its sample.
            run: the function that is timed, which does the work `times` times.
            alone: whether `run` computes without waiting for other ranks.
            times: the time of `run` is divided by it.
            after: runs before each `run` and is not part of its time. If `run` waits for other
                ranks, they arrive at different times because of `after`: the time counts from the
                arrival of the last rank, its mean over ranks is the sample, and the waits give
                samples `ARRIVAL_SKEW`.
            issued: kind and work of one more sample on a GPU, of the host's seconds to issue `run`;
                only of probes that run alone without `after`.
        """
        self._probes.append(_Probe(kind, work, run, alone, times, after, issued))

    def access(self, size: int) -> None:
        """Access free memory of `size` bytes, on a CPU, as steps before have done in training.

        The first access to a page takes microseconds, and ten times as long on a virtual machine.
        """
        if self.device.type == "cpu":
            torch.empty(size, dtype=torch.uint8).fill_(1)

    def samples(self) -> list[Sample]:
        """Time all probes; one sample for each, and the samples `ARRIVAL_SKEW`.

        Every rank calls it and gets equal samples. A sample is that of the slowest rank, or the
        mean over ranks for probes with `after` that wait for other ranks.
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
            probe.run()  # a first run may allocate memory and does not count
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
        if self._timer is not None and probe.alone and probe.after is None:
            took = self._timer.measure(probe.run, repeats)
            return RepeatTimes(took.device, took.device, host=took.host)
        before, found = [], []
        for _ in range(repeats):
            if probe.after is not None:
                before.append(self.once(probe.after))
            found.append(self.once(probe.run, alone=probe.alone))
        if probe.drifts:
            early = self._waits_for_slowest(before)
            found = [max(0.0, took - lead) for took, lead in zip(found, early, strict=True)]
            # Differences of two times: noise makes them too short as often as too long.
            return RepeatTimes(fmean(found), median(found), tuple(before))
        # Some operations of a step are slow and add to its time, so the mean counts.
        return RepeatTimes(fmean(found), sorted(found)[len(found) // 10])

    def _waits_for_slowest(self, took: Sequence[float]) -> list[float]:
        """For each repeat, the seconds by which this rank was faster than the slowest one."""
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
            if probe.issued is not None and self._timer is not None:
                hosts = [median(one.host for one in of_rank) for of_rank in figures]
                found.append(Sample(*probe.issued, max(hosts)))
        drifts = [
            [[s for one in rounds[number] for s in one.before] for rounds, _ in every]
            for number in kept
        ]
        return [*found, *_arrival_skews(drifts, quiet)]

    def _clock(self, alone: bool) -> Callable[[], float]:
        thread = alone and self.device.type == "cpu" and torch.get_num_threads() == 1
        return time.thread_time if thread else time.perf_counter

    def is_past(self, end: float) -> bool:
        """Whether it is past `end` (of `time.monotonic`) on rank 0; every rank calls it."""
        is_past = torch.tensor([float(time.monotonic() > end)], device=self.device)
        dist.broadcast(is_past, 0)
        return bool(is_past.item())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _of_ranks(figures: Sequence[Sequence[RepeatTimes]], quiet: bool, probe: _Probe) -> float:
    """The seconds of a probe from its `figures`, of every rank in every round.

    On a quiet host it is the median over rounds of means; on a noisy host the minimum over rounds
    of first deciles, because noise only adds time, and for probes that drift the median of medians.
    Over ranks it is the maximum, or the mean for
    probes that drift. Rounds are combined first for probes that run alone: ranks are slow in
    different rounds, and the maximum of each round would have the noise of several ranks.
    """
    weigh: Callable[[Sequence[float]], float] = median if quiet or probe.drifts else min
    values = [[one.usual if quiet else one.low for one in rounds] for rounds in figures]
    if probe.alone:
        return max(weigh(rounds) for rounds in values)
    of_round = fmean if probe.drifts else max
    return weigh([of_round(ranks) for ranks in zip(*values, strict=True)])


def _arrival_skews(drifts: Sequence[Sequence[Sequence[float]]], quiet: bool) -> list[Sample]:
    """Samples of the mean wait for the slowest rank after 1, 2, 4, ... computations.

    `drifts` has, for every round and rank, the seconds of its computations in order. Differences
    between ranks accumulate until ranks wait for each other. So times of consecutive computations
    are added up before they are compared.
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
    """CPU seconds of all ranks that share cores with this rank, of which each gives `seconds`."""
    mine = (socket.gethostname(), frozenset(cores()), seconds)
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return sum(took for host, where, took in every if host == mine[0] and where & mine[1])


def quietest_rounds(busy: Sequence[float]) -> list[int]:
    """Indices of the rounds that count: all quiet ones, or the quieter half if fewer are quiet.

    `busy` is, for each round, the fraction of the cores that other programs used.

    >>> quietest_rounds([0.01, 0.5, 0.02, 0.03]), quietest_rounds([0.5, 0.9, 0.4, 0.6])
    ([0, 2, 3], [0, 2])
    """
    order = sorted(range(len(busy)), key=lambda number: busy[number])
    quiet = [number for number in order if busy[number] <= _QUIET]
    return sorted(quiet if 2 * len(quiet) >= len(busy) else order[: (len(busy) + 1) // 2])
