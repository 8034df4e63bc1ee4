"""Saves and resumes a run, on any number of devices and under any plan.

Each rank writes its own tiles with `torch.distributed.checkpoint`; the rest of the state is one
JSON record. `folder.py` says when a checkpoint is complete.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from shardwright.ir.plan import Plan
from shardwright.plan_io.files import save_plan
from shardwright.runtime.weight_files.dcp_index import CheckpointError, DamageError, read_index
from shardwright.train.checkpoint.async_save import AsyncSaver
from shardwright.train.checkpoint.folder import CheckpointFolder, SavedCheckpoint
from shardwright.train.checkpoint.reading import SafeReader, read_digests
from shardwright.train.checkpoint.state import TrainingState

PLAN = "plan.json"
# Errors of a record or an index that is of another model, or was written by someone else.
_MISFITS = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError)

T = TypeVar("T")


@final
class Checkpoints:
    """Checkpoints of a run under `plan`; every rank calls its methods at the same steps.

    Args:
        folder: a folder that all ranks see; with several hosts, on a shared file system.
        plan: written into each checkpoint; it is not read again.
        keep: the number of latest checkpoints that are kept.
        patience: seconds to wait until another run releases the folder, e.g. after a restart.

    Raises:
        CheckpointError: another run uses the folder, or it cannot be written.
    """

    def __init__(self, folder: str | Path, plan: Plan, keep: int = 3, patience: float = 30) -> None:
        self.folder, self.plan = CheckpointFolder(Path(folder), keep), plan
        self.last: int | None = None  # the step last saved or resumed from
        self._background = AsyncSaver()
        self._begun: tuple[int, Future[None]] | None = None
        _on_rank_0(partial(self.folder.open, patience))

    def save(self, run: TrainingState) -> None:
        """Write a checkpoint of the run and wait until it is complete.

        Args:
            run: the state to write.

        Raises:
            CheckpointError: on every rank, if a rank could not write.
        """
        self.begin(run)
        self.settle()

    def begin(self, run: TrainingState) -> None:
        """Begin to write a checkpoint from a copy of the run; steps may continue meanwhile.

        Call `settle` for the preceding checkpoint first.

        Args:
            run: the state to write.

        Raises:
            CheckpointError: on every rank, if the folder cannot be created.
        """
        assert self._begun is None, "one checkpoint at a time"
        step, record = run.step, run.record()
        try:
            staging = _on_rank_0(lambda: self.folder.begin(step))
        except OSError as e:
            raise self._failed(step, e) from e

        def finish() -> None:
            if _rank() == 0:
                self._finish(step, record)

        self._begun = step, self._background.write(run.tensors(), staging, finish)

    def settle(self) -> None:
        """Wait until the checkpoint that was begun is complete; do nothing without one.

        Raises `CheckpointError` on every rank, if a rank could not write.
        """
        if self._begun is None:
            return
        (step, outcome), self._begun = self._begun, None
        error = outcome.exception()
        if dist.is_initialized():
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, _sendable(error))
            error = next((e for e in every if e is not None), None)
        if error is not None:
            raise self._failed(step, error) from error
        self.last = step

    def close(self, seconds: float = 60) -> None:
        """Wait for the checkpoint that was begun; raise nothing.

        Unlike `settle`, one rank may call it alone, e.g. when it ends with an error.

        Args:
            seconds: the longest wait.
        """
        if self._begun is not None:
            with suppress(TimeoutError):
                self._begun[1].exception(seconds)

    def _failed(self, step: int, error: BaseException) -> CheckpointError:
        if _rank() == 0:
            self.folder.abandon(step)
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder.path}:"
            f" {_reason(error)}"
        )

    def resume(self, run: TrainingState) -> tuple[SavedCheckpoint | None, list[str]]:
        """Restore the latest undamaged checkpoint into `run`.

        Later checkpoints, which are damaged, are renamed to `step-….damaged`.

        Args:
            run: a run before its first step, under any plan.

        Returns:
            The checkpoint, or None if the folder has none, and the errors of later checkpoints.

        Raises:
            CheckpointError: the checkpoint is of another model, optimizer or schedule, or all
                checkpoints are damaged.
        """
        wrong: list[str] = []
        before: int | None = None
        while True:
            saved, passed = _on_rank_0(partial(self.folder.latest, before))
            wrong += passed
            if saved is None:
                break
            try:
                self._restore(run, saved)
            except DamageError as e:
                wrong.append(str(e))
                before = saved.step
                continue
            if wrong:
                _on_rank_0(partial(self.folder.set_aside_after, saved.step))
            self.last = saved.step
            return saved, wrong
        if wrong:
            raise CheckpointError(
                f"no checkpoint in {self.folder.path} can be read ({wrong[0]}); restore one, or"
                " give another folder to start anew"
            )
        return None, wrong

    def _restore(self, run: TrainingState, saved: SavedCheckpoint) -> None:
        """Load one checkpoint.

        Raises `DamageError`, or `CheckpointError` for another model, optimizer or schedule; both on
        all ranks.
        """
        try:
            index = _raise_on_all_ranks(lambda: read_index(saved.folder, saved.sizes))
            digests = None
            if saved.has_digests:
                digests = _raise_on_all_ranks(lambda: read_digests(saved.folder))
            with _quiet():
                load(
                    _raise_on_all_ranks(lambda: run.prepare(saved.record, index)),
                    storage_reader=SafeReader(saved.folder, saved.sizes, digests),
                    planner=DefaultLoadPlanner(
                        flatten_state_dict=False, flatten_sharded_tensors=False
                    ),
                )
            _raise_on_all_ranks(lambda: run.restore(saved.record, saved.step))
        except (CheckpointException, *_MISFITS) as e:
            if damage := _damage(e):
                raise damage from e
            raise CheckpointError(f"cannot go on from {saved.folder}: {_reason(e)}") from e

    def _finish(self, step: int, record: dict[str, Any]) -> None:
        staging = self.folder.staging(step)
        save_plan(self.plan, staging / PLAN)
        sizes = {file.name: file.stat().st_size for file in staging.iterdir()}
        try:
            read_index(staging, sizes)
        except CheckpointError as e:
            raise CheckpointError(f"{e}; do all hosts see the same {self.folder.path}?") from e
        digested = {name for name, _, _ in read_digests(staging)}
        self.folder.finish(step, record, digested)


def _on_rank_0(do: Callable[[], Any]) -> Any:
    """Run `do` on rank 0; return its result or raise its error on every rank."""
    if not dist.is_initialized():
        return do()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [do(), None]
        except (OSError, ValueError) as e:
            answer = [None, e]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _raise_on_all_ranks(do: Callable[[], T]) -> T:
    """Run `do` on each rank and return its result; raise an error of one rank on all ranks."""
    error: Exception | None = None
    try:
        result = do()
    except _MISFITS as e:
        error = e
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, error)
        error = next((e for e in found if e is not None), None)
    if error is not None:
        raise error
    return result


def _sendable(error: BaseException | None) -> Exception | None:
    """The error in a form that can be pickled and sent to other ranks."""
    if error is None or isinstance(error, OSError | CheckpointError):
        return error
    return CheckpointError(_reason(error))


def _damage(error: BaseException) -> DamageError | None:
    """The `DamageError` that caused an error of loading, of the lowest rank with one; or None."""
    if isinstance(error, CheckpointException):
        found = (cause for _, (cause, _) in sorted(error.failures.items()))
        return next((cause for cause in found if isinstance(cause, DamageError)), None)
    return error if isinstance(error, DamageError) else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _reason(error: BaseException) -> str:
    """The cause of an error in one line; of errors that DCP gathers, that of the lowest rank."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        where = f" (rank {rank})" if dist.is_initialized() else ""
        return f"{_reason(cause)}{where}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore DCP's warning that it loads without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
