"""An asynchronous pipeline on real ranks, over `torch.distributed`.

A rank runs its stage by `stage.py`, alone or with the other ranks of the group that shares the
stage; this file handles neighbours, drains and errors. A stage that fails sends its error to both
neighbours instead of the next message, and they pass it on, so that all ranks end with it.
Neighbours detect a process that ended; the timeout detects one that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.pipeline import StageRanks
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.schedules.weight_versions import Weights, weights_named
from shardwright.runtime.async_pipeline.stage import AsyncStage, Scheduler, StageUpdate
from shardwright.runtime.comm.channel import StageFailed
from shardwright.runtime.comm.equal_ranks import all_equal
from shardwright.runtime.comm.first_error import FirstErrorRecord, is_broken_link
from shardwright.runtime.device import default_device
from shardwright.runtime.modes import WithoutDropout
from shardwright.runtime.parameter_store import place_in
from shardwright.runtime.pipeline.stage import StageModule, Stages, capture_stages
from shardwright.runtime.pipeline.stage_links import Seat, StageLinks

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)


def async_pipeline(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    weights: str = "spectrain",
    cuts: Sequence[int] | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    timeout: timedelta = TIMEOUT,
) -> AsyncPipeline:
    """Build this rank's stage of `model`, one stage per process of the initialised process group.

    Args:
        model: the module, with equal weights on every rank.
        args: positional arguments of one call, an example batch.
        kwargs: keyword arguments of that call.
        weights: which weights the two passes use: `"spectrain"`, `"pipeoptim"`, each also with
            `"-decay"`, `"stash"` or `"stale"` (docs/how-to/async.md).
        cuts: numbers of the operators before which the graph is cut; None: balanced.
        seed: the seed of dropout masks.
        device: the device of the stage; None: as in `parallelize`.
        timeout: the longest time that a rank waits for a neighbour.

    Raises:
        PipelineError: the graph cannot be cut in this way, or the stages or weights of ranks
            differ.
    """
    how = weights_named(weights)
    if not dist.is_initialized():
        raise PipelineError("there is no process group; start with torchrun, one process per stage")
    stages = capture_stages(model, args, kwargs, stages=dist.get_world_size(), cuts=cuts)
    device = device or default_device(model)
    return AsyncPipeline(stages, model, how, device=device, seed=seed, timeout=timeout)


class AsyncPipeline(StageModule):
    """This rank's stage of an asynchronous pipeline, which does not train as one device does.

    `parallelize` builds it for an asynchronous plan, `async_pipeline` without a plan. Every rank
    makes an optimizer of `parameters()` and calls `train_step` with the same batches. Call `drain`
    before looking at weights: evaluation, checkpoints, the end.
    """

    def __init__(
        self,
        stages: Stages,
        model: nn.Module,
        weights: Weights,
        *,
        device: torch.device,
        device_mesh: DeviceMesh | None = None,
        seed: int = 0,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        _agree([*stages.fingerprints, weights.name])
        self._sw_board = FirstErrorRecord()
        seat = _seat(device_mesh, dist.get_rank(), stages.staged.decisions.stage_ranks)
        group = device_mesh[stages.staged.decisions.mesh.names] if device_mesh else None
        stages = stages.under(weights)
        programs = stages.programs(seat.stage, seat.place)
        link = StageLinks(programs.call, seat, device, timeout)
        super().__init__(stages, seat.stage, programs, link, model, device, seed, group)
        self._sw_seat, self._sw_link = seat, link
        self._sw_async = AsyncStage(self, seat.stage, len(stages.parts), weights)
        self._sw_failure = ""
        self._sw_evaluation = WithoutDropout(model, stages.captured.graph)

    @property
    def lag(self) -> int:
        """The number of mini-batches by which the last stage is ahead of this one."""
        return self._sw_link.lag

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(
            "an asynchronous pipeline has no forward pass to call; use train_step(optimizer,"
            " batch), or drain(optimizer) and then evaluate(batch)"
        )

    def train_step(
        self,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        scheduler: Scheduler | None = None,
        clip_norm: float | None = None,
        discount_steps: int = 0,
        check: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Put one mini-batch into the pipeline and update this stage's weights.

        Args:
            optimizer: an optimizer of the parameters of this stage.
            batch: the global batch, equal on every rank.
            scheduler: a learning-rate schedule; it steps after each update of this stage.
            clip_norm: the largest norm of this stage's gradients.
            discount_steps: the number of updates over which a late stage's learning rate rises to
                its full value (PipeMare, arXiv 1910.05124).
            check: called with each loss on the last stage, before the backward pass; an exception
                that it raises ends all ranks.

        Returns:
            The loss of the mini-batch whose backward pass this stage finished: on stage k of N,
                that of N - k - 1 calls before; NaN while the pipeline fills.
        """
        update = StageUpdate(optimizer, scheduler, clip_norm, discount_steps, check)

        def work() -> torch.Tensor:
            self._sw_link.open()
            loss = self._sw_async.step(update, self.part_of(batch))
            return torch.tensor(float("nan")) if loss is None else loss

        return self._sw_guard(work)

    def drain(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Scheduler | None = None,
        clip_norm: float | None = None,
        discount_steps: int = 0,
    ) -> list[torch.Tensor]:
        """Finish what is in flight, on all ranks.

        Args:
            optimizer: as in `train_step`.
            scheduler: as in `train_step`.
            clip_norm: as in `train_step`.
            discount_steps: as in `train_step`.

        Returns:
            The losses that `train_step` has not returned.
        """
        update = StageUpdate(optimizer, scheduler, clip_norm, discount_steps)

        def work() -> list[torch.Tensor]:
            losses = self._sw_async.drain(update)
            self._sw_link.close()
            return losses

        return self._sw_guard(work)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Compute the loss of a batch with the current weights, without dropout.

        Args:
            batch: the global batch, equal on every rank.

        Returns:
            The loss, on every rank.
        """
        if self._sw_link.is_open:
            raise PipelineError("mini-batches are under way; call drain(optimizer) before evaluate")
        self.check_evaluation()

        def work() -> torch.Tensor:
            run = self._sw_async.evaluation(self.part_of(batch))
            loss = self._sw_async.evaluate(run, returning=True)
            assert loss is not None, "the program ends with the loss"
            return loss

        return self._sw_guard(work)

    def check_evaluation(self) -> None:
        """Raise `PlanError` if evaluation differs from training in more than dropout."""
        self._sw_evaluation.check()

    def _sw_guard(self, work: Callable[[], T]) -> T:
        """Run `work`; report an error in it to the neighbours before it is raised."""
        if self._sw_failure:
            raise StageFailed(self._sw_failure)
        try:
            return work()
        except StageFailed as e:
            self._sw_fail(str(e))
            raise StageFailed(self._sw_failure) from e
        except Exception as e:
            # If another rank of this stage ended, its error is the cause, not this one.
            said = self._sw_board.read() if is_broken_link(e) else ""
            if said or (is_broken_link(e) and self._sw_seat.others):
                self._sw_fail(said or f"{self._sw_seat.company} is gone: {_first_line(e)}")
                raise StageFailed(self._sw_failure) from e
            self._sw_fail(f"{self._sw_seat} failed: {type(e).__name__}: {e}")
            raise

    def _sw_fail(self, text: str) -> None:
        """Report an error to the other ranks; all of them report the first one."""
        self._sw_failure = self._sw_board.write(text)
        self._sw_link.fail(self._sw_failure)


def _seat(device_mesh: DeviceMesh | None, rank: int, ranks: StageRanks) -> Seat:
    """The position of a rank; its neighbours are at the same place of their groups."""
    if device_mesh is None:
        return Seat(rank, 0, (tuple(range(ranks.groups)),))
    everywhere = device_mesh.mesh.flatten().tolist()
    groups = [[everywhere[one] for one in ranks.of_group(group)] for group in range(ranks.groups)]
    stage, place = ranks.position(place_in(device_mesh))
    others = [other for other in groups[stage] if other != rank]
    return Seat(stage, place, tuple(zip(*groups, strict=True)), tuple(others))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _agree(mine: list[str]) -> None:
    """Raise `PipelineError`, on all ranks, unless all have the same stages and weights."""
    if all_equal(mine, (dist.group.WORLD,)):
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise PipelineError(
                f"rank {rank} has other stages or weights ({', '.join(theirs)}) than rank 0"
                f" ({', '.join(everyone[0])}); build the same model the same way everywhere"
            )
