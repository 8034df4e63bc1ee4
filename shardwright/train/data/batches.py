"""An endless stream of batches with a position that can be saved.

A position is the number of finished passes over the data and the number of batches taken from the
current pass. To resume, the pass starts again with the states of the random number generators that
it started with, and the batches that were taken are skipped. Data with methods `state_dict` and
`load_state_dict` is positioned by them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

from shardwright.train.data.batch import JobError
from shardwright.train.data.randomness import random_states, set_random_states


@final
class Batches:
    """An endless iterator over `data`, an iterable or a function that returns one.

    `next` raises `JobError` if a pass over the data has no batch.
    """

    def __init__(self, data: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.data = data
        self.passes = self.taken = 0
        self._start: dict[str, Any] | None = None
        self._source: Iterable[Any] = ()
        self._now: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._now is None:
            self._begin()
        while True:
            assert self._now is not None
            try:
                batch = next(self._now)
            except StopIteration:
                if self.taken == 0:
                    raise JobError(
                        "Job.data ended and gave nothing when started anew; give a function that"
                        " returns a fresh iterator, or more batches"
                    ) from None
                self.passes += 1
                self.taken = 0
                self._begin()
                continue
            self.taken += 1
            return batch

    def state_dict(self) -> dict[str, Any]:
        """The position, for `load_state_dict`: plain values, small tensors, state of the data."""
        place = {"passes": self.passes, "taken": self.taken, "start": self._start}
        own = _with_state(self._now) or _with_state(self._source)
        return {**place, "own": own.state_dict()} if own is not None else place

    def load_state_dict(self, place: Mapping[str, Any]) -> None:
        """Continue at the position `place`.

        Raises `JobError` if the data is shorter than it was, or has no `load_state_dict` any more.
        """
        self.passes, self.taken = place["passes"], 0
        if place["start"] is None:
            return
        set_random_states(place["start"])
        self._begin()
        if "own" in place:
            own = _with_state(self._now) or _with_state(self._source)
            if own is None:
                raise JobError(
                    "the data of the checkpoint knew its own place, Job.data has no"
                    " load_state_dict; give the same data or start anew"
                )
            own.load_state_dict(place["own"])
            if own is self._source:  # an existing iterator ignores the loaded state
                self._now = iter(self._source)
            self.taken = place["taken"]
            return
        assert self._now is not None
        for self.taken in range(1, place["taken"] + 1):
            try:
                next(self._now)
            except StopIteration:
                raise JobError(
                    f"the checkpoint is {place['taken']} batches into a pass over the data, which"
                    f" has {self.taken - 1} now; give the same data or start anew"
                ) from None

    def _begin(self) -> None:
        self._start = random_states()
        self._source = self.data() if callable(self.data) else self.data
        self._now = iter(self._source)


def _with_state(data: Any) -> Any:
    has = all(callable(getattr(data, name, None)) for name in ("state_dict", "load_state_dict"))
    return data if has else None
