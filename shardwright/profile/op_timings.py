"""Times single operators at the sizes of plans, on all ranks at once.

All ranks run the same call at the same time, so that they share cores and memory as in training.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.layout import Seconds
from shardwright.machine.calls import OpCall, OperandSpec, Timing
from shardwright.machine.model import Machine
from shardwright.profile.local_ranks import START_SECONDS, Tell, join, run_ranks
from shardwright.profile.measure import user_cache
from shardwright.profile.timing import Stopwatch
from shardwright.profile.timing_cache import TimingCache
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.ranks import threads_of
from shardwright.tracing.export.operators import operator_of, to_torch

_TOGETHER = 6  # calls that are timed in turn, whose tensors exist at once
_CACHES = 2**26  # bytes: more than the caches of a core
_SETS = 8  # the most copies of a call's tensors; small ones are cached in a step, too
_ROOM = (
    8  # memory of a call over that of its arguments: results, gradients, workspace, fragmentation
)
_MOST_ROOM = 2**30  # bytes


def user_timing_cache(warn: Callable[[str], None]) -> TimingCache:
    """The cache of timings in the user's cache directory; `warn` is called with errors."""
    return TimingCache(user_cache() / "operators.sqlite", warn)


def with_cached_timings(machine: Machine, known: TimingCache) -> Machine:
    """`machine` with the cached timings of its kind of device, and no others."""
    return _with(machine, known.find(device_key(machine)))


def with_timings(
    machine: Machine, calls: Sequence[OpCall], seconds: float, known: TimingCache, tell: Tell
) -> Machine:
    """`machine` with the cached timings and those of `calls`, which are measured and cached.

    Args:
        machine: a machine of `with_cached_timings`; it is returned if all `calls` are cached.
        calls: the calls to time.
        seconds: the time to measure; later calls may remain without timings.
        known: the cache.
        tell: called with the progress.

    Raises:
        MachineError: the ranks fail.
    """
    key = device_key(machine)
    before = known.find(key)
    new = [call for call in calls if str(call) not in before]
    if not new:
        return machine
    found = measure_calls(machine, new, seconds, tell)
    known.keep(key, found)
    return _with(machine, {**before, **found})


def _with(machine: Machine, found: Mapping[str, Timing | None]) -> Machine:
    timings = tuple(found[call] for call in sorted(found))
    device = replace(machine.device, timings=tuple(t for t in timings if t is not None))
    return replace(machine, device=device)


def device_key(machine: Machine) -> str:
    """The key of timings in the cache: kind and number of devices, and the version of torch.

    On CPUs it also has the threads of a rank, and whether the ranks tuned the host.
    """
    devices = machine.devices
    if torch.cuda.is_available():
        what = f"{torch.cuda.get_device_name()}, {devices} of them"
    else:
        what = f"{_processor()}, {devices} ranks of {threads_of(devices)} threads"
        what += ", tuned" if _tuned(machine) else ", not tuned"
    return f"{what}, torch {torch.__version__}"


def _tuned(machine: Machine) -> bool:
    """Whether the ranks that measured `machine` tuned the host."""
    return machine.measured is not None and machine.measured.tuned_host


def measure_calls(
    machine: Machine, calls: Sequence[OpCall], seconds: float, tell: Tell
) -> dict[str, Timing | None]:
    """Timings of `calls` by their text, measured on new processes, one for each device.

    Calls are timed in the given order while `seconds` last. The value is None for a call that
    cannot run alone. Raises `MachineError` if the processes fail.
    """
    given = (list(calls), seconds, _tuned(machine))
    found = json.loads(run_ranks(machine.devices, _rank, given, tell, START_SECONDS))
    return {
        text: None if times is None else Timing(text, Seconds(times[0]), Seconds(times[1]))
        for text, times in found.items()
    }


def _rank(
    rank: int, devices: int, folder: str, calls: Sequence[OpCall], seconds: float, tune_host: bool
) -> None:
    def timed(tell: Tell) -> str:
        return json.dumps(time_calls(calls, seconds, tell))

    join(rank, devices, folder, timed, tune_host=tune_host)


def time_calls(
    calls: Sequence[OpCall], seconds: float, tell: Tell
) -> dict[str, tuple[float, float] | None]:
    """Seconds forward and backward of calls by their text, on the ranks of the process group.

    Every rank calls it. Calls after `seconds` are left out, but the first are always timed; the
    value is None for a call that cannot run alone.
    """
    found: dict[str, tuple[float, float] | None] = {}
    kind = backend_of().spec.device
    end = time.monotonic() + seconds
    for start in range(0, len(calls), _TOGETHER):
        some = calls[start : start + _TOGETHER]

        def part(_what: str, done: float, before: int = start) -> None:
            tell("operators", min(1.0, (before + done * _TOGETHER) / len(calls)))

        stopwatch = Stopwatch(kind, seconds * len(some) / len(calls), part)
        if start and stopwatch.is_past(end):
            break
        runs = {str(call): _runnable(call, stopwatch.device) for call in some}
        room = _ROOM * max(_size(call) * _sets(call) for call in some)
        stopwatch.access(min(_MOST_ROOM, room))
        for text, run in runs.items():
            if run is not None:
                _add(stopwatch, text, run)
        times = {sample.kind: sample.seconds for sample in stopwatch.samples()}
        for text, run in runs.items():
            found[text] = None
            if run is not None:
                forward = times[f"{text} forward"]
                both = times.get(f"{text} both", forward)
                found[text] = forward, times.get(f"{text} backward", max(0.0, both - forward))
    return found


def _add(stopwatch: Stopwatch, text: str, run: _CallRuns) -> None:
    """Add the probes of a call: forward, and backward if its results have gradients."""
    stopwatch.add(f"{text} forward", 1, run.forward, alone=True)
    if not run.gradients:
        return
    if stopwatch.device.type == "cpu":
        stopwatch.add(f"{text} backward", 1, run.backward, alone=True, after=run.ahead)
    else:  # the queue of a GPU takes no function between the runs
        stopwatch.add(f"{text} both", 1, run.both, alone=True)


def _sets(call: OpCall) -> int:
    """The number of copies of a call's tensors that its runs use in turn."""
    return min(_SETS, 1 + _CACHES // max(1, _size(call)))


class _CallRuns:
    """Runs of a call, forward and backward.

    Consecutive runs use different tensors, and the results of the last runs stay alive, because in
    a step other operators evict a call's arguments, its results and what it saves from the caches
    before they are used again. Raises what the call raises if it cannot run with these arguments.
    """

    def __init__(self, call: OpCall, device: torch.device) -> None:
        given = [_tensor(one, device) for one in call.given]
        self._function = operator_of(call.target)
        self._turns = cycle([_arguments(call, given) for _ in range(_sets(call))])
        made = self._made()[0]
        self.gradients = [torch.ones_like(result) for result in made if result.requires_grad]
        self._kept = deque([self._made() for _ in range(_sets(call))], _sets(call))
        if self.gradients:
            self.backward()
            self.ahead()

    def forward(self) -> object:
        """Run forward, and let go of the results of an earlier run."""
        self._kept.append(self._made())
        return self._kept

    ahead = forward

    def backward(self) -> object:
        """Run the backward pass of the earliest forward run, after which `ahead` makes another."""
        return self._backward(*(self._kept.popleft() if self._kept else self._made()))

    def both(self) -> object:
        """Run forward and backward."""
        return self._backward(*self._made())

    def _backward(self, made: list[torch.Tensor], trained: list[torch.Tensor]) -> object:
        outputs = [result for result in made if result.requires_grad]
        return torch.autograd.grad(outputs, trained, self.gradients, allow_unused=True)

    def _made(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The results, and the arguments that require gradients."""
        args, kwargs, trained = next(self._turns)
        returned = self._function(*args, **kwargs)
        return [returned] if isinstance(returned, torch.Tensor) else list(returned), trained


def _runnable(call: OpCall, device: torch.device) -> _CallRuns | None:
    """Runs of the call; None if it cannot run."""
    try:
        return _CallRuns(call, device)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None  # its arguments do not fit these sizes, or it runs only within a program


def _size(call: OpCall) -> int:
    """Bytes of the tensors in the arguments."""
    return sum(prod(one.shape) * ITEM_BYTES[one.dtype] for one in call.given)


def _arguments(
    call: OpCall, given: Sequence[torch.Tensor]
) -> tuple[list[Any], dict[str, Any], list[torch.Tensor]]:
    """The call's arguments with copies of the tensors `given`; the copies with gradients."""
    copies = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
    values = {str(i): copy for i, copy in enumerate(copies)}
    device = copies[0].device
    args = [to_torch(arg, values, device) for arg in call.args]
    kwargs = {key: to_torch(value, values, device) for key, value in call.kwargs}
    return args, kwargs, [copy for copy in copies if copy.requires_grad]


def _tensor(given: OperandSpec, device: torch.device) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, given.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        count = torch.Size(given.shape).numel()  # indices that are valid for every size
        return (torch.arange(count, device=device) % 2).to(dtype).reshape(given.shape)
    made = torch.rand(given.shape, device=device, dtype=torch.float32) + 0.5
    return made.to(dtype).requires_grad_(given.requires_grad)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return re.sub(r"\s+", " ", names[0]) if names else platform.machine()
