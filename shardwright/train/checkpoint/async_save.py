"""Writes one checkpoint at a time while training continues.

The tensors are copied to the host first, from a GPU into pinned memory, which is kept for the next
checkpoint. `torch.distributed.checkpoint.async_save` writes the copy in a thread and with a gloo
group of its own, so that its collectives do not mix with those of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import cast, final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from shardwright.train.checkpoint.digests import DigestWriter


@final
class AsyncSaver:
    """The writer of one run; every rank makes and calls it at the same time."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._pinned: DefaultStager | None = None  # copies from a GPU

    def write(
        self, tensors: Mapping[str, torch.Tensor], staging: Path, finish: Callable[[], None]
    ) -> Future[None]:
        """Copy `tensors` and begin to write them to `staging`; then call `finish` on this rank.

        The future has the first error of writing, by any rank, or of this rank's `finish`.
        """
        stager = self._stager(tensors)
        written = cast(
            "Future[object]",
            async_save(
                {name: tensor.detach() for name, tensor in tensors.items()},
                async_stager=stager,
                storage_writer=DigestWriter(staging, single_file_per_rank=True),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=self._group,
                no_dist=self._group is None,
            ),
        )
        outcome: Future[None] = Future()

        def done(written: Future[object]) -> None:
            try:
                written.result()
                finish()
            except BaseException as e:  # in a thread of torch; `result` raises it
                outcome.set_exception(e)
            else:
                outcome.set_result(None)

        written.add_done_callback(done)
        return outcome

    def _stager(self, tensors: Mapping[str, torch.Tensor]) -> DefaultStager:
        """The copier of `tensors` to the host, which returns once they are copied."""
        if not any(tensor.device.type == "cuda" for tensor in tensors.values()):
            return DefaultStager(_options(pinned=False))  # the copy is freed once it is written
        if self._pinned is None:
            self._pinned = DefaultStager(_options(pinned=True))
        return self._pinned


def _options(*, pinned: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=pinned,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=pinned,
    )
