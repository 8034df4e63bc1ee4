"""The parts that modules of step programs share: executors, and the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir.graph import Graph
from shardwright.program.step.step_program import StepProgram
from shardwright.runtime.executor.executor import EndOf, ProgramRun, StepExecutor, Updater
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.regions.regions import Regions


class ProgramModule(nn.Module):
    """Executors of a step program in training, and of a program without gradients in evaluation.

    `groups` has the process group of each channel, `make` is as in `to_module`. `messages` gives
    the ends of the messages of either, where they are not sent in `groups`.
    """

    def __init__(
        self,
        program: StepProgram,
        evaluation: StepProgram,
        graph: Graph,
        groups: Mapping[str, dist.ProcessGroup],
        make: Callable[[Special], nn.Module],
        device: torch.device,
        messages: tuple[EndOf, EndOf] | tuple[None, None] = (None, None),
    ) -> None:
        super().__init__()
        self.program, self.update_parts = program, program.update_parts
        self.loads = {load.leaf: load.shape for load in program.loads}
        self.regions = Regions(program.regions, make, device)
        self.training_step = StepExecutor(program, self.regions, groups, messages[0])
        self.evaluation = StepExecutor(evaluation, self.regions, groups, messages[1])
        self.ended: ProgramRun | None = None  # a step whose update has not run yet
        loss = graph.tensor[graph.outputs[0]]
        self.one = torch.ones((), dtype=getattr(torch, loss.dtype), device=device)
        self.scale: torch.Tensor | None = None  # of the loss of the next step, float32 []

    def seed(self) -> torch.Tensor:
        """The gradient of the loss, from which the next step begins."""
        return self.one if self.scale is None else self.scale.to(self.one)

    def update(self, optimizer: Updater) -> None:
        """Run the last step's update of the parameters."""
        run, self.ended = self.ended, None
        assert run is not None, "a step has run"
        run.finish(optimizer)
