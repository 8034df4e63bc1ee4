"""What the command line plans, trains and verifies: a model with its batch, optimizer and data.

Knows neither plans nor ranks. torch is only named in annotations, so that a
`Job` can be declared without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.ir.habits import Habits

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from shardwright.train.batches import Batches

Batch = Mapping[str, Any] | tuple[Any, ...]  # keyword or positional arguments of the model


class JobError(ValueError):
    """A job that cannot be planned or trained as its author declared it."""


@dataclass(frozen=True)
class Job:
    """One training job, serial: nothing in it says how it will be made parallel.

    * `model`: builds the module; what the module returns is, or holds, the loss;
    * `batch`: an example of a *global* batch, or a function that makes one;
    * `optimizer`: builds the optimizer from the parameters;
    * `data`: global batches, equal on every rank, or a function that gives
      them; started anew when they end before `steps`;
    * `schedule`: builds the learning-rate schedule from the optimizer; it steps once a step;
    * `seed`: of the model's weights, of its dropout and of what data draws;
    * `rng`: "exact" draws what one device draws, "fast" keeps fused kernels;
    * `batch_norm`: statistics of the whole batch, "exact", or of each rank's part, "local".
    """

    model: Callable[[], nn.Module]
    batch: Batch | Callable[[], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    data: Iterable[Batch] | Callable[[], Iterable[Batch]]
    steps: int
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    seed: int = 0
    name: str = ""
    rng: str = "exact"
    batch_norm: str = "exact"

    def __post_init__(self) -> None:
        for field in ("model", "optimizer"):
            if not callable(getattr(self, field)):
                given = type(getattr(self, field)).__name__
                raise JobError(
                    f"Job.{field} is a {given}, not a function that makes the {field};"
                    f" write {field}=lambda{' parameters' if field == 'optimizer' else ''}: …"
                )
        if self.schedule is not None and not callable(self.schedule):
            raise JobError(
                f"Job.schedule is a {type(self.schedule).__name__}, not a function that makes one;"
                " write schedule=lambda optimizer: …"
            )
        if not callable(self.data) and not isinstance(self.data, Iterable):
            raise JobError(
                f"Job.data is a {type(self.data).__name__}; give batches, or a function of none"
            )
        _ = self.habits  # which raises for a word that is not known
        if self.steps < 1:
            raise JobError(f"Job.steps is {self.steps}; it must be at least 1")

    @property
    def habits(self) -> Habits:
        """What the job gives up of being exactly one device."""
        return Habits(self.rng, self.batch_norm)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the model for the example batch."""
        return _call("Job.batch", self.batch() if callable(self.batch) else self.batch)

    def check_data(self) -> None:
        """Raise `JobError` unless the data's first batch has the shapes of the example batch."""
        args, kwargs = self.call()
        planned = _shapes(args, kwargs)
        given = _shapes(*_call("Job.data", next(self.batches())))
        for key in (*planned, *given):
            if planned.get(key) != given.get(key):
                raise JobError(
                    f"Job.data gives {key} {given.get(key, 'nowhere')}, the example batch has"
                    f" {planned.get(key, 'none')}; give batches of one shape, or plan for theirs"
                )

    def batches(self) -> Batches:
        """Batches without end: the data, again and again."""
        from shardwright.train.batches import Batches

        return Batches(self.data)


def _call(name: str, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    raise JobError(
        f"{name} gives a {type(batch).__name__}; give a mapping of keyword arguments, or a tuple"
        " of positional ones"
    )


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a call, by position or keyword."""
    named = {**{str(i): value for i, value in enumerate(args)}, **kwargs}
    return {key: tuple(value.shape) for key, value in named.items() if hasattr(value, "shape")}
