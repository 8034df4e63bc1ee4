"""Reads a Dataset in batches: each epoch has every sample once, on any number of ranks.

That also holds for runs that are interrupted and resumed on another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from math import ceil
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from shardwright.train.data.batch import JobError
from shardwright.train.data.randomness import random_states, seed_all, set_random_states

Collate = Callable[[list[Any]], Any]


@final
class Samples:
    """Batches of `size` samples of `dataset`; each iteration is the rest of one pass over it.

    The order of samples depends on seed and pass only, the random numbers of a sample on seed, pass
    and index. `rows` maps the size of a global batch to the positions in it of the samples that
    this rank reads; None: it reads all.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        collate: Collate | None = None,
        workers: int = 0,
    ) -> None:
        assert isinstance(dataset, Sized), "checked by the job"
        self.dataset, self.size, self.length = dataset, size, len(dataset)
        self.seed, self.shuffle, self.workers = seed, shuffle, workers
        self.collate = collate or default_collate
        self.rows: Callable[[int], Sequence[int] | None] = lambda size: None
        self.passes = self.taken = 0

    @property
    def remainder(self) -> int:
        """Samples in the last batch of a pass; 0 if it is as large as the others."""
        return self.length % self.size

    def __iter__(self) -> Iterator[Any]:
        """The remaining batches of the current pass."""
        loader = DataLoader(
            _Seeded(self.dataset, self.seed, self.passes),
            batch_sampler=list(self._rest()),
            collate_fn=self.collate,
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(self.seed),
        )
        for batch in loader:
            self.taken += 1
            yield tuple(batch) if isinstance(batch, list) else batch
        self.passes, self.taken = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "taken": self.taken, "length": self.length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["length"] != self.length:
            raise JobError(
                f"the checkpoint is of a Dataset of {state['length']} samples, Job.data has"
                f" {self.length}; give the same data or start anew"
            )
        self.passes, self.taken = state["passes"], state["taken"]
        if self.taken == ceil(self.length / self.size):  # saved after the last batch of a pass
            self.passes, self.taken = self.passes + 1, 0

    def _rest(self) -> Iterator[list[int]]:
        order = torch.arange(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(_mixed(self.seed, self.passes))
            order = torch.randperm(self.length, generator=generator)
        for chosen in order.split(self.size)[self.taken :]:
            mine = self.rows(len(chosen))
            yield (chosen if mine is None else chosen[list(mine)]).tolist()


class _Seeded(Dataset[Any]):
    """`dataset` with random numbers that are equal on whichever rank reads a sample."""

    def __init__(self, dataset: Dataset[Any], seed: int, passes: int) -> None:
        self.dataset, self.seed = dataset, _mixed(seed, passes)

    def __getitem__(self, index: int) -> Any:
        before = random_states()
        seed_all(_mixed(self.seed, index))
        try:
            return self.dataset[index]
        finally:
            set_random_states(before)


def rows_of(module: Any, batch: Any) -> list[int] | None:
    """Positions of the samples of a global batch that this rank needs; None: it needs all.

    `batch` is an example of a global batch. A batch of its shapes, each element of which is the
    position of its sample, is cut by `module.local_batch`. None also where a rank needs a part of a
    sample, or where tensors differ in their number of samples or in the samples that are needed.
    """
    mapping = isinstance(batch, dict)
    values = batch.values() if mapping else batch
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len({t.shape[0] if t.dim() else -1 for t in tensors}) != 1 or not tensors[0].dim():
        return None

    def marked(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        numbers = torch.arange(len(value)).view(-1, *[1] * (value.dim() - 1))
        return numbers.expand(value.shape)

    marks = {k: marked(v) for k, v in batch.items()} if mapping else tuple(map(marked, batch))
    part = module.local_batch(marks)
    found: list[int] | None = None
    for whole, mine in zip(values, part.values() if mapping else part, strict=True):
        if not isinstance(whole, torch.Tensor):
            continue
        rows = mine.reshape(len(mine), -1)[:, 0].tolist()
        full = mine.shape[1:] == whole.shape[1:] and bool((mine == _column(mine)).all())
        if not full or (found is not None and rows != found):
            return None
        found = rows
    return found


def _column(part: torch.Tensor) -> torch.Tensor:
    """The first element of each row, (n, 1, ..., 1), of a tensor (n, ...)."""
    return part.reshape(len(part), -1)[:, 0].view(-1, *[1] * (part.dim() - 1))


def _mixed(seed: int, number: int) -> int:
    """A seed in [0, 2**63) that is different for each number below 2**63 with the same `seed`."""
    return (seed * 0x9E3779B1 + number * 0x85EBCA77 + 0xC2B2AE3D) % 2**63
