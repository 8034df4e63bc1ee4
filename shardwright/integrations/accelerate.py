"""Accelerate under a plan: an `Accelerator` that leaves batches and gradients to the module."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch import nn
from torch.optim import Optimizer

from shardwright.integrations.planned_runs import resume_run, save_run
from shardwright.ir.plan import Plan, PlanError
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.weight_files.dcp_index import CheckpointError


def hide_ranks(state: PartialState) -> None:
    """Let accelerate go on as one process, of which all ranks but the first write nothing.

    Otherwise it would wrap the module, and give every rank a batch of its own.
    """
    state.distributed_type = DistributedType.NO
    state.num_processes = 1


class PlannedAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` for one module that `parallelize` returned, its optimizer and loaders.

    Loaders give the global batch, and the module takes this rank's part. Plans have their
    precision, so this has no `mixed_precision`. `accumulate`, `backward`, `clip_grad_norm_`,
    `save_state` and `load_state` do what they do on one device; a state is loaded under any plan
    and on any number of ranks.

    Args:
        plan: the plan of the module, written beside each state.
        cpu: whether ranks compute on CPUs where there are GPUs.
        options: the other arguments of `Accelerator`.

    Raises:
        PlanError: an argument asks accelerate for what the plan decides.
    """

    def __init__(self, plan: Plan, *, cpu: bool = False, **options: Any) -> None:
        decided = ("mixed_precision", "fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin")
        for name in (*decided, "parallelism_config", "dynamo_plugin", "dynamo_backend"):
            if options.get(name) not in (None, "no"):
                raise PlanError(
                    f"the plan decides on {name}; leave it out, and plan with what it is"
                )
        loading = copy.copy(options.pop("dataloader_config", None) or DataLoaderConfiguration())
        loading.dispatch_batches = False  # by which the first process reads for all
        hide_ranks(PartialState(cpu=cpu))
        super().__init__(cpu=cpu, mixed_precision="no", dataloader_config=loading, **options)
        self.plan = plan

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Take the planned module as it is.

        Args:
            model: what `parallelize` returned.
            args: ignored, as accelerate neither moves nor wraps the module.
            options: ignored likewise.

        Raises:
            PlanError: it is another module.
        """
        if not isinstance(model, ParallelModule):
            raise PlanError(
                f"{type(model).__name__} runs no plan; give sw.parallelize(model, plan,"
                " outputs='model'), and its optimizer"
            )
        if model not in self._models:
            self._models.append(model)
        return model

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> str:
        """Write module, optimizer, schedules, samplers and random states; every rank calls it.

        Args:
            output_dir: the folder.
            args: as of `Accelerator.save_state`.
            options: likewise.

        Raises:
            CheckpointError: without a folder, or on all ranks where one cannot write.
        """
        folder = self._folder(output_dir)
        with self._without_tensors(self.state.process_index):
            super().save_state(str(folder), *args, **options)
        save_run(folder, self.plan, *self._one_of_each())
        return str(folder)

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Restore what `save_state` wrote, also under another plan; every rank calls it.

        Args:
            input_dir: the folder.
            args: as of `Accelerator.load_state`.
            options: likewise.

        Raises:
            CheckpointError: without a folder, or it is of another model or optimizer.
        """
        folder = self._folder(input_dir)
        with self._without_tensors(0):  # of whose files there is one, whatever the number of ranks
            super().load_state(str(folder), *args, **options)
        resume_run(folder, self.plan, *self._one_of_each())

    def _folder(self, given: str | None) -> Path:
        if given is None:
            raise CheckpointError(
                "ranks may see different numbers of folders, so name the one, as in"
                " save_state('runs/state-100'); automatic_checkpoint_naming is not followed"
            )
        return Path(given)

    def _one_of_each(self) -> tuple[ParallelModule, Optimizer]:
        if len(self._models) != 1 or len(self._optimizers) != 1:
            raise CheckpointError(
                f"{len(self._models)} modules and {len(self._optimizers)} optimizers are prepared,"
                " and a state holds one of each; prepare both, or save with"
                " torch.distributed.checkpoint"
            )
        return self._models[0], self._optimizers[0].optimizer

    @contextmanager
    def _without_tensors(self, reader: int) -> Iterator[None]:
        """Hide module and optimizer from accelerate, which saves and loads them whole."""
        self._one_of_each()
        hidden = {"_models": self._models, "_optimizers": self._optimizers}
        rank = self.state.process_index
        self.__dict__.update(_models=[], _optimizers=[])
        self.state.process_index = reader
        try:
            yield
        finally:
            self.__dict__.update(hidden)
            self.state.process_index = rank
