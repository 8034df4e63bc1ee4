"""`Job`: the model, batch, optimizer and data of a training job.

A job knows neither plans nor ranks. This module does not import torch, so that a `Job` can be
declared without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from shardwright.ir.options.numerics import Numerics
from shardwright.train.data.batch import Batch, Call, JobError, call_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim.lr_scheduler import LRScheduler

    from shardwright.train.data.batches import Batches

_OF_TRAINING = {  # fields that plans do not need, and an example of each for errors
    "optimizer": "lambda parameters: torch.optim.AdamW(parameters)",
    "data": "batches, a function of none that gives them, or a Dataset",
    "steps": "1000, or --steps 1000",
}
_FUNCTIONS = {  # fields that are functions, and an example of each for errors
    "model": "lambda: …",
    "optimizer": "lambda parameters: …",
    "schedule": "lambda optimizer: …",
    "tokens": "lambda batch: …",
    "collate": "lambda samples: …",
}
_LEAST = {
    **{"steps": 1, "accumulate": 1, "evaluate_every": 1},
    **{"discount_steps": 0, "workers": 0, "seed": -(2**63)},
}
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "shapes": ((tuple, list), "a list of batches"),
    "padding": ((Mapping,), "what batches are filled up with, by keyword or position"),
    "weights": ((str, os.PathLike, type(None)), "a safetensors file or a folder of them"),
    "shuffle": ((bool,), "True or False"),
    "compiled": ((bool,), "True or False"),
    "name": ((str,), "a text"),
}

Data = Any  # batches, a function that returns them, or a torch Dataset of samples


@dataclass(frozen=True)
class Job:
    """A training job of one device, without anything about parallelism.

    Jobs without `optimizer`, `data` and `steps` can be planned and verified, and not trained.

    Attributes:
        model: builds the module, whose output is or contains the loss.
        batch: an example of a *global* batch (a mapping of keyword arguments or a tuple of
            positional ones), or a function that makes one.
        optimizer: builds the optimizer from the parameters; without it AdamW is planned.
        data: global batches, equal on every rank, or a function that returns them; they start again
            if they end before `steps`. Or a map-style `Dataset` of samples, which are shuffled
            and collated into batches of the example's size; a rank may read only those it needs.
        steps: the number of optimizer steps, unless `run --steps` says another one.
        schedule: builds the learning-rate schedule from the optimizer; it advances once per step.
        clip_norm: the largest norm of all gradients together; larger ones are scaled down.
        discount_steps: updates over which late stages of an asynchronous pipeline begin with
            smaller learning rates (docs/how-to/async.md); no effect on other plans.
        accumulate: the number of batches in one step.
        tokens: the weight of a batch among the batches of a step, so that the loss is a mean over
            tokens; by default all batches have equal weights.
        shapes: examples of batches of other shapes.
        padding: the value with which each tensor of a smaller batch is padded to the smallest
            planned shape that contains it, by keyword or position.
        evaluation: data as above; its mean loss is computed every `evaluate_every` steps and at the
            end.
        evaluate_every: steps between evaluations; None: only at the end.
        collate: collates samples of a `Dataset`; None: torch's default.
        shuffle: whether samples of a `Dataset` are shuffled.
        workers: the number of processes that read a `Dataset`, per rank.
        weights: initial weights: a safetensors file, or a Hugging Face folder of them.
        compiled: whether steps run through `torch.compile`.
        seed: the seed of the model's weights, its dropout, and the random numbers of the data.
        name: the name of the job in reports.
        rng: as in `capture`.
        batch_norm: as in `capture`.
        precision: as in `capture`.
        reduce: as in `capture`.
        norms: as in `capture`.
        logits: as in `capture`.

    Raises:
        JobError: a field has the wrong type or range.
    """

    model: Callable[[], nn.Module]
    batch: Batch | Callable[[], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    data: Data | None = None
    steps: int | None = None
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    discount_steps: int = 0
    accumulate: int = 1
    tokens: Callable[[Batch], float] | None = None
    shapes: Sequence[Batch] = ()
    padding: Mapping[Any, float] = field(default_factory=dict)
    evaluation: Data | None = None
    evaluate_every: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool = True
    workers: int = 0
    weights: str | os.PathLike[str] | None = None
    compiled: bool = False
    seed: int = 0
    name: str = ""
    rng: str = "exact"
    batch_norm: str = "exact"
    precision: str = "model"
    reduce: str = "stored"
    norms: str = "fused"
    logits: str = "fused"

    def __post_init__(self) -> None:
        for name, example in _FUNCTIONS.items():
            given = getattr(self, name)
            # A module is callable, too, and its class makes one.
            is_module = hasattr(given, "named_parameters") and not isinstance(given, type)
            makes = callable(given) and not is_module
            if not (makes or (given is None and name != "model")):
                kind, what = type(given).__name__, "the model" if name == "model" else "one"
                raise JobError(
                    f"Job.{name} is a {kind}, not a function that makes {what}; write"
                    f" {name}={example}"
                )
        for name in ("data", "evaluation"):
            given = getattr(self, name)
            if given is not None and not _is_data(given):
                raise JobError(
                    f"Job.{name} is a {type(given).__name__}; give batches, a function of none"
                    " that gives them, or a Dataset"
                )
        norm = self.clip_norm
        if norm is not None and not (isinstance(norm, Real) and norm > 0):
            raise JobError(f"Job.clip_norm is {norm!r}; it must be more than 0")
        for name, least in _LEAST.items():
            number = getattr(self, name)
            if number is None and name in ("evaluate_every", "steps"):
                continue
            if not isinstance(number, Integral) or isinstance(number, bool):
                raise JobError(f"Job.{name} is {number!r}; it must be a whole number")
            if number < least:
                raise JobError(f"Job.{name} is {number}; it must be at least {least}")
        if self.seed >= 2**64:
            raise JobError(f"Job.seed is {self.seed}; it must be less than 2**64")
        for name, (kinds, what) in _KINDS.items():
            if not isinstance(given := getattr(self, name), kinds):
                raise JobError(f"Job.{name} is a {type(given).__name__}; give {what}")
        _ = self.numerics  # raises for an unknown word

    def require_training(self, steps: int | None = None) -> None:
        """Check that the job has all that training needs.

        Args:
            steps: the number of optimizer steps in place of `Job.steps`; None: those.

        Raises:
            JobError: optimizer, data or steps are missing.
        """
        self._require(*(name for name in _OF_TRAINING if name != "steps" or not steps))

    def _require(self, *names: str) -> None:
        if missing := [name for name in names if getattr(self, name) is None]:
            examples = "; ".join(f"{name}={_OF_TRAINING[name]}" for name in missing)
            raise JobError(
                f"the Job has no {' and no '.join(missing)}, so it can be planned and not trained;"
                f" give {examples}"
            )

    def built_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer that `optimizer` builds.

        Args:
            parameters: the parameters to train.

        Raises:
            JobError: the job has no `optimizer`.
        """
        self._require("optimizer")
        assert self.optimizer is not None, "it is required"
        return self.optimizer(parameters)

    @property
    def last_step(self) -> int:
        """`steps`; raises `JobError` without them."""
        self._require("steps")
        assert self.steps is not None, "they are required"
        return self.steps

    @property
    def numerics(self) -> Numerics:
        """The numerics options of the job."""
        words = self.rng, self.batch_norm, self.precision, self.reduce, self.norms, self.logits
        return Numerics(*words)

    def call(self) -> Call:
        """Positional and keyword arguments of the model for the example batch."""
        return call_of("Job.batch", self.example)

    @property
    def example(self) -> Batch:
        """The example batch."""
        return self.batch() if callable(self.batch) else self.batch

    def other_calls(self) -> list[Call]:
        """Calls of all further shapes: those of `shapes`, and a Dataset's last, smaller batch.

        Raises `JobError` if the example batch cannot be cut to the size of the last batch.
        """
        from shardwright.train.data.samples import Samples
        from shardwright.train.data.shapes import smaller

        calls = [call_of("Job.shapes", batch) for batch in self.shapes]
        for data in (self.batches().data, self.evaluation_batches()):
            if isinstance(data, Samples) and data.remainder:
                rest = smaller(self.example, data.remainder)
                if rest is None:
                    raise JobError(
                        f"the Dataset's last batch has {data.remainder} samples, and not every"
                        " tensor of the example batch has one row per sample; name the smaller"
                        " batch in Job.shapes and give its data as batches"
                    )
                calls.append(call_of("Job.batch", rest))
        return calls

    def check_data(self) -> None:
        """Raise `JobError` unless the first batches have planned shapes and dtypes.

        A batch that can be padded to a planned shape counts as one.
        """
        from shardwright.runtime.plan_transfer import shapes_of
        from shardwright.train.data.shapes import fitted, require_dtypes

        known = [shapes_of(*call) for call in (self.call(), *self.other_calls())]
        batch = next(self.batches())
        fitted(batch, known, self.padding)
        require_dtypes(batch, self.call())
        if (evaluation := self.evaluation_batches()) is not None:
            first = next(iter(evaluation), None)
            if first is None:
                raise JobError("Job.evaluation gives no batch; leave it out, or give some")
            fitted(first, known, self.padding)
            require_dtypes(first, self.call())

    def batches(self) -> Batches:
        """A new endless stream of the training batches, from the start.

        Raises `JobError` without `data`.
        """
        from shardwright.train.data.batches import Batches

        self._require("data")
        return Batches(self._of(self.data, self.shuffle))

    def evaluation_batches(self) -> Iterable[Batch] | None:
        """One pass over the evaluation batches; None without `evaluation`."""
        if self.evaluation is None:
            return None
        data = self._of(self.evaluation, shuffle=False)
        return data() if callable(data) else data

    def _of(self, data: Data, shuffle: bool) -> Iterable[Batch] | Callable[[], Iterable[Batch]]:
        """The batches of some data; a `Dataset` is read by samples of the example's batch size."""
        if not _is_dataset(data):
            batches: Iterable[Batch] | Callable[[], Iterable[Batch]] = data
            return batches
        from shardwright.train.data.samples import Samples

        args, kwargs = self.call()
        sizes = [len(v) for v in (*args, *kwargs.values()) if getattr(v, "ndim", 0)]
        if not sizes:
            raise JobError("the example batch has no tensor that tells how many samples it holds")
        return Samples(
            data,
            sizes[0],
            seed=self.seed,
            shuffle=shuffle,
            collate=self.collate,
            workers=self.workers,
        )


def _is_dataset(data: object) -> bool:
    """Whether this is a map-style `torch.utils.data.Dataset`; other data are batches."""
    import torch.utils.data as data_module

    known = isinstance(data, data_module.Dataset)
    return known and not isinstance(data, data_module.IterableDataset)


def _is_data(data: object) -> bool:
    if isinstance(data, str | bytes):
        return False
    return callable(data) or isinstance(data, Iterable) or hasattr(data, "__getitem__")
