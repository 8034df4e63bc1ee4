"""Detects a stalled run and reports which rank stalls it and where the other ranks wait.

A collective that one rank does not enter blocks the others until its timeout, and the error names
no rank. Here a thread on every rank detects that no step has finished for too long, or that the
start does not proceed. It writes the position of its rank to a store. The first rank that answers
reports all positions. Then the ranks end, so that torchrun can restart them.
"""

from __future__ import annotations

import linecache
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

import torch

from shardwright.runtime.backend.base import wait_for
from shardwright.runtime.comm.redistribute import Redistribution
from shardwright.train.coordination.stalled_ranks import (
    Position,
    StalledRanks,
    Store,
    longest_wait,
)

STALLED = 75  # exit status: "try again" in sysexits.h
_STARTING = -1  # stands for the number of steps before training starts
_CONNECTING = 10.0  # the longest wait for the store, seconds
_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[2])
_WAITS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "init_process_group", "monitored_barrier", "new_group", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "wait", "wait_tensor",
)  # fmt: skip


class _Beat(NamedTuple):
    """The last progress: the number of finished steps, its time, and seconds until the next.

    It is replaced as one value, because the watchdog's thread may read it at any time.
    """

    step: int
    time: float
    seconds: float


@final
class Watchdog:
    """Watches the thread that makes it, which must call `beat` every `seconds` while it trains.

    Before training it must call `starting` every `start_seconds`. On a stall, `say` is called with
    the report on one rank, and `end` with the exit status `STALLED` on each rank that stalls.

    Args:
        store: connects to a store that all ranks share.
        rank: this rank.
        world: the number of ranks.
        seconds: the longest time of a step.
        start_seconds: the longest time of a part of the start.
        say: prints the report.
        end: ends this process.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        rank: int,
        world: int,
        seconds: float,
        start_seconds: float,
        say: Callable[[str], None],
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.seconds, self.start_seconds = seconds, start_seconds
        self.say, self.end = say, end
        self._watched = threading.get_ident()
        self.starting()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._check_beats, name="watchdog", daemon=True)
        self._thread.start()

    def starting(self) -> None:
        """Record progress during the start."""
        self._beat = _Beat(_STARTING, time.monotonic(), self.start_seconds)

    def beat(self, step: int) -> None:
        """Record progress: `step` steps are finished."""
        self._beat = _Beat(step, time.monotonic(), self.seconds)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _check_beats(self) -> None:
        while not self._closed.wait(min(1.0, self.seconds / 4, self.start_seconds / 4)):
            beat = self._beat
            if time.monotonic() - beat.time > beat.seconds:
                try:
                    self._report_stall(beat)
                finally:
                    self.end(STALLED)
                return

    def _report_stall(self, beat: _Beat) -> None:
        """Report the positions of all ranks, or of this one if the store cannot be reached."""
        mine = {"step": beat.step, **location_of(sys._current_frames().get(self._watched))}
        asked: queue.Queue[tuple[StalledRanks, dict[int, Position] | None] | str] = queue.Queue()

        def ask() -> None:
            try:
                ranks = StalledRanks(self.store(), self.rank, self.world, beat.seconds)
                asked.put((ranks, ranks.collect(mine)))
            except RuntimeError as e:  # of torch's stores: the process with the store has ended
                asked.put(str(e).splitlines()[0])

        # In another thread, because torch waits for the first answer of a store without a timeout.
        threading.Thread(target=ask, name="watchdog's question", daemon=True).start()
        try:
            answer = asked.get(timeout=longest_wait(beat.seconds) + _CONNECTING)
        except queue.Empty:
            answer = "no answer in time"
        if isinstance(answer, str):
            self.say(
                f"rank {self.rank} {mine['text']} for {beat.seconds:.0f} s, and the store that all"
                f" ranks share does not answer ({answer})"
            )
            return
        ranks, found = answer
        if found is not None:
            self.say(report(found, self.world, beat.seconds))
            with suppress(RuntimeError):
                ranks.reported()


def report(found: dict[int, Position], world: int, seconds: float) -> str:
    """The report as one line: the ranks that do not proceed, and where the others wait.

    Args:
        found: by rank, `location_of` and the number of finished steps, of the ranks that answered.
        world: the number of ranks.
        seconds: the time without progress.
    """
    silent = [rank for rank in range(world) if rank not in found]
    busy = [rank for rank in found if not found[rank]["waits"]]
    step = min(one["step"] for one in found.values()) + 1
    behind = [rank for rank in found if found[rank]["step"] + 1 == step]
    lines = [f"no step was done for {seconds:.0f} s, in step {step}"]
    starting = step == _STARTING + 1
    if starting:
        lines = [f"the start did not go on for {seconds:.0f} s"]
    # Parts of a start end at different times: a rank without an answer may not be late yet.
    if silent and not (starting and busy):
        lines.append(f"held up by rank {_listed(silent)}, which does not answer")
    elif busy:
        lines += [f"held up by rank {rank}, which {found[rank]['text']}" for rank in busy]
    elif len(behind) < len(found):
        lines.append(f"held up by rank {_listed(behind)}, behind the others")
    elif len({one["text"] for one in found.values()}) == 1:
        lines.append("all ranks wait for each other")
    else:
        lines.append("all ranks wait, for different things")
    others: dict[str, list[int]] = {}
    for rank, one in found.items():
        if one["waits"]:
            others.setdefault(one["text"], []).append(rank)
    lines += [f"rank {_listed(ranks)} {text}" for text, ranks in others.items()]
    return "; ".join(lines)


def location_of(frame: FrameType | None) -> dict[str, Any]:
    """The position of a thread: `waits`, whether for other ranks, and `text`, where."""
    frames = list(_outwards(frame))
    call = next((f for f in frames if _collective(f)), None)
    what = next(filter(None, map(_operator, frames)), "")
    if call is not None and call.f_code is wait_for.__code__:
        return {"waits": True, "text": f"waits for {call.f_locals['_what']}{what}"}
    if call is not None:
        what = what or _caller(frames)
        return {"waits": True, "text": f"waits in {call.f_code.co_name}{what}"}
    theirs = next((f for f in frames if _is_users(f)), frames[0] if frames else None)
    if theirs is None:
        return {"waits": False, "text": "has ended"}
    code = theirs.f_code
    return {
        "waits": False,
        "text": f"is in {code.co_name} ({Path(code.co_filename).name}:{theirs.f_lineno})",
    }


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frame: FrameType) -> bool:
    code = frame.f_code
    theirs = code.co_name in _WAITS and code.co_filename.startswith(f"{_TORCH}/distributed")
    return theirs or code is wait_for.__code__


def _operator(frame: FrameType) -> str:
    """The redistribution or the line of generated code in this frame as text, or ""."""
    if frame.f_code.co_filename.startswith(f"{_OURS}/runtime"):
        for name in ("self", "how"):
            known = frame.f_locals.get(name)
            if isinstance(known, Redistribution):
                return f" of %{known.value}, {known.text}"
    if frame.f_code.co_filename.startswith("<eval_with_key>"):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).partition(";")[0]
        return f" at {line.strip()}" if line.strip() else ""
    return ""


def _caller(frames: list[FrameType]) -> str:
    """The innermost function of this package as text, or ""."""
    ours = next((f for f in frames if f.f_code.co_filename.startswith(_OURS)), None)
    if ours is None:
        return ""
    return f" in {ours.f_code.co_name} ({Path(ours.f_code.co_filename).name}:{ours.f_lineno})"


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    installed = file.startswith((_TORCH, _OURS, "<", sys.base_prefix)) or "site-packages" in file
    return not installed


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def timeout_of(seconds: float) -> timedelta:
    """A timeout of collectives that exceeds the detection after `seconds` and the report."""
    return timedelta(seconds=seconds + longest_wait(seconds) + _CONNECTING + 60)
