"""One module for several batch shapes and modes, with shared parameters.

A captured graph has fixed batch shapes. For other shapes, such as a smaller last batch or sequences
of another length, the model is captured again, and the graph runs by the same plan
(`plan_transfer.py`). Each shape has its own graph for each mode (`modes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, final

import torch
from torch import nn
from torch.amp import GradScaler

from shardwright.ir.plan import InputSpec, Plan, PlanError
from shardwright.runtime.batch import BatchError
from shardwright.runtime.parallel import parallelize
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.parameters.nan_origin import origin
from shardwright.runtime.pipeline.runner import PipelineModule
from shardwright.runtime.plan_transfer import (
    Shapes,
    plan_for_shapes,
    shapes_of,
    shapes_text,
)
from shardwright.runtime.sharded_ops.experts import Skew, skews
from shardwright.runtime.train_module import OnLoss, TrainModule, arguments
from shardwright.tracing.call import example_call


@final
class ShapeVariants:
    """Parallel modules of one model for several batch shapes, which share parameters and buffers.

    Args:
        model: the module that the plan was made for, with values.
        plan: the plan for the first shape; the others run under it.
        others: calls (args, kwargs) of other shapes.
        seed: as in `parallelize`.
        device: as in `parallelize`.
        compiled: whether steps run through `torch.compile`.
        evaluated: whether evaluation is captured now, which raises where it is impossible; without,
            it is captured when it is first asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        others: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        seed: int = 0,
        device: torch.device | None = None,
        compiled: bool = False,
        evaluated: bool = False,
    ) -> None:
        self.main: TrainModule = _steps(model, plan, seed, device)
        first = _planned(plan.inputs)
        calls = {first: example_call(plan.inputs, plan.constants)}
        calls |= {shapes: call for call in others if (shapes := shapes_of(*call)) != first}
        self._modules: dict[Shapes, TrainModule] = {first: self.main}
        for shapes, call in calls.items():
            if shapes != first:
                other_plan = plan_for_shapes(model, plan, *call)
                self._modules[shapes] = _steps(model, other_plan, seed, device)
                _share(self.main, self._modules[shapes], shapes)
            if evaluated:
                self._modules[shapes].prepare_evaluation()
        if compiled:
            for module in self._modules.values():
                module.compile_programs()

    def set_timeout(self, timeout: timedelta) -> None:
        """`TrainModule.set_timeout` of the modules of all shapes."""
        for module in self._modules.values():
            module.set_timeout(timeout)

    @property
    def known(self) -> tuple[Shapes, ...]:
        """Shapes of whole batches that it takes, the planned ones first."""
        return tuple(self._modules)

    def module_for(self, batch: Any) -> TrainModule:
        """The module that runs a batch of this shape, made ready to run.

        Raises `BatchError` if there is none. With one shape only it takes ranks' own parts too.
        """
        only = len(self._modules) == 1
        shapes = self.known[0] if only else shapes_of(*arguments(batch))
        if (module := self._modules.get(shapes)) is None:
            known = "; ".join(map(shapes_text, self._modules))
            raise BatchError(
                f"the batch has {shapes_text(shapes)}; known are {known}: pad the batch, or name"
                " its shape before training starts"
            )
        if module is not self.main:
            module.train(self.main.training)
        return module

    def forward_backward(
        self, batch: Any, on_loss: OnLoss | None = None, scaler: GradScaler | None = None
    ) -> torch.Tensor:
        """Run forward and backward pass.

        Args:
            batch: a global batch of any of the shapes.
            on_loss: as of `TrainModule.forward_backward`.
            scaler: likewise.

        Returns:
            The loss of the global batch, a scalar; its gradients are added to `grad`.
        """
        module = self.module_for(batch)
        module.share_random_state(self.main)
        loss = module.forward_backward(batch, on_loss, scaler)
        self.main.share_random_state(module)
        return loss

    def origin_of_nonfinite(self, batch: Any, state: torch.Tensor) -> str:
        """The operator that first makes NaN or infinity of `batch` with this `random_tensor`."""
        module = self.module_for(batch)
        assert isinstance(module, ParallelModule | PipelineModule), "what `_steps` makes"
        seed, number = state.tolist()
        return origin(module, batch, (seed, number))

    def loss(self, batch: Any) -> torch.Tensor:
        """Compute the loss in the mode that the module is in.

        Args:
            batch: a global batch of any of the shapes.
        """
        args, kwargs = arguments(batch)
        module = self.module_for(batch)
        module.share_random_state(self.main)
        found: torch.Tensor = module(*args, **kwargs)
        self.main.share_random_state(module)
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.main.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.main.named_parameters()

    def lasting_buffers(self) -> dict[str, torch.Tensor]:
        return self.main.lasting_buffers()

    def random_tensor(self) -> torch.Tensor:
        return self.main.random_tensor()

    def random_state(self) -> tuple[int, int]:
        return self.main.random_state()

    def set_random_state(self, state: tuple[int, int]) -> None:
        self.main.set_random_state(state)

    def local_batch(self, batch: Any) -> Any:
        """Cut this rank's part out of a global batch.

        Args:
            batch: a global batch of any of the shapes.
        """
        return self.module_for(batch).local_batch(batch)

    def skews(self) -> list[Skew]:
        """The imbalance of the rows routed to experts."""
        return skews(list(self._modules.values()))

    def train(self, mode: bool = True) -> ShapeVariants:
        self.main.train(mode)
        return self


def _steps(model: nn.Module, plan: Plan, seed: int, device: torch.device | None) -> TrainModule:
    """The parallel module, whose steps are those of one device."""
    module = parallelize(model, plan, seed=seed, device=device)
    if not isinstance(module, TrainModule):
        raise PlanError(
            f"schedule {plan.schedule!r} trains otherwise than one device does, and a job cannot"
            " ask for that yet; plan without it, or train by hand as docs/how-to/async.md says"
        )
    return module


def _share(main: TrainModule, other: TrainModule, shapes: Shapes) -> None:
    """Let `other` run on the parameters and buffers of `main`."""
    mine = dict(main.named_parameters(remove_duplicate=False))
    graph = other.graph
    unread = {key for leaf in graph.leaves if not graph.consumers[leaf.name] for key in leaf.keys}
    for name, _ in list(other.named_parameters(remove_duplicate=False)):
        if name not in mine and name in unread:
            continue
        if name not in mine:
            raise PlanError(
                f"with a batch of {shapes_text(shapes)} the model reads {name} in another stage of"
                " the pipeline than with the planned one; plan without --stages"
            )
        path, _, last = name.rpartition(".")
        # Sub-modules refuse other parameters than their own from users.
        nn.Module.register_parameter(other.get_submodule(path), last, mine[name])
    # Of those that `main` does not keep each has its own: they are constants of the model.
    theirs = {name for name, _ in other.named_buffers(remove_duplicate=False)}
    for name in theirs & {*main.lasting_buffers()}:
        path, _, last = name.rpartition(".")
        other.get_submodule(path).register_buffer(last, main.get_buffer(name))


def _planned(inputs: Sequence[InputSpec]) -> Shapes:
    return tuple((spec.key, spec.shape) for spec in inputs)
