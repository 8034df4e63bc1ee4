"""Lightning's Trainer under a plan: a strategy that plans one module of the LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

from shardwright.integrations.planned_runs import planned_module
from shardwright.ir.plan import Plan, PlanError
from shardwright.runtime.model_values import Stored
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.weight_files.dcp_index import CheckpointError

_RANDOM = "shardwright_random_state"  # the key in a checkpoint


class PlannedStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """A strategy under which one module of the LightningModule runs a plan.

    Every rank gets the global batch, and the module takes its part: the Trainer gets
    `use_distributed_sampler=False`. Plans have their precision, so its stays `"32-true"`, which
    changes nothing. `ModelCheckpoint` writes folders, each rank its part, from which `ckpt_path`
    resumes under any plan and on any number of ranks.

    Args:
        plan: the plan of that module.
        module: its attribute in the LightningModule, before the first step.
        outputs: as in `parallelize`.
        weights: as in `parallelize`.
        seed: as in `parallelize`.
        options: `process_group_backend` and `timeout`, as in `ModelParallelStrategy`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        module: str = "model",
        outputs: str = "model",
        weights: Stored = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(1, plan.devices, save_distributed_checkpoint=True, **options)
        self.plan, self.module = plan, module
        self.outputs, self.weights, self.seed = outputs, weights, seed

    def setup_environment(self) -> None:
        """Let ranks meet, and plan the module once the LightningModule has built it.

        Raises:
            PlanError: the Trainer has a precision of its own.
        """
        super().setup_environment()
        if self.precision_plugin.precision != "32-true":
            raise PlanError(
                f"precision={self.precision_plugin.precision!r} is no part of the plan, which has"
                " its own; leave it out, and plan with precision='bf16'"
            )
        build = self.lightning_module.configure_model

        def configure_model() -> None:
            build()
            self._parallelize()

        self.lightning_module.configure_model = configure_model

    def _parallelize(self) -> None:
        model = getattr(self.lightning_module, self.module)
        if not isinstance(model, ParallelModule):  # Lightning may call it again
            planned = planned_module(model, self.plan, self.outputs, self.weights, self.seed)
            setattr(self.lightning_module, self.module, planned)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Refuse the sampler that Lightning puts in the place of the loader's, which may shuffle.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "every rank gets the global batch in the loader's own order; give the Trainer"
            " use_distributed_sampler=False"
        )

    @property
    def planned(self) -> ParallelModule:
        """The module that runs the plan."""
        found = getattr(self.lightning_module, self.module)
        assert isinstance(found, ParallelModule), "Lightning has set up the strategy"
        return found

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a folder, each rank its part.

        Args:
            checkpoint: what Lightning saves.
            filepath: the folder.
            storage_options: must be None, as in `ModelParallelStrategy`.

        Raises:
            CheckpointError: steps write a buffer that is in no state dict.
        """
        module = self.planned
        if lost := module.lasting_buffers().keys() - module.state_dict().keys():
            raise CheckpointError(
                f"steps write {min(lost)}, which is no part of the state dict; register it with"
                " persistent=True"
            )
        super().save_checkpoint(
            {**checkpoint, _RANDOM: module.random_state()}, filepath, storage_options
        )

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> Mapping[str, Any]:
        """Read a folder that `save_checkpoint` wrote, under any plan.

        Args:
            checkpoint_path: the folder.
            weights_only: as in `torch.load`, of what is no tensor of module or optimizer.

        Returns:
            What Lightning saved, without module and optimizers.
        """
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if (state := found.pop(_RANDOM, None)) is not None:
            self.planned.set_random_state(state)
        return found
