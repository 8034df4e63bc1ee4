"""One pipeline stage on one device: its parameters, its buffers and its program.

Parameters keep the module's names and shapes. The program takes the weights as
arguments, so that it can run with others than those that are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwright.capture.build import Captured
from shardwright.ir.graph import LeafKind
from shardwright.lower.balance import balanced_cuts, operator_work
from shardwright.lower.decisions import everything_whole
from shardwright.lower.discover import capture_with_rules
from shardwright.lower.fx import Special, to_module
from shardwright.lower.lower import lower
from shardwright.lower.masters import with_casts
from shardwright.lower.program import Dropout, Uniform
from shardwright.lower.stages import RECEIVED, Stage, StageError, split
from shardwright.rules.analysis import Analysis, analyze
from shardwright.runtime.dropout import GlobalDropout, GlobalUniform, random_state


@dataclass(frozen=True)
class Stages:
    """A captured call and its stages."""

    captured: Captured
    parts: tuple[Stage, ...]

    @cached_property
    def analysis(self) -> Analysis:
        """Of the whole graph: what an operator draws depends on its place there."""
        return analyze(self.captured.graph)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return tuple(part.graph.fingerprint for part in self.parts)


def capture_stages(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stages: int,
    cuts: Sequence[int] | None = None,
) -> Stages:
    """Capture one call and cut it, into stages of balanced work unless `cuts` are given.

    Raises `StageError` for a model that does not return its loss alone.
    """
    return cut_stages(capture_with_rules(model, args, kwargs or {}), stages, cuts)


def cut_stages(captured: Captured, stages: int, cuts: Sequence[int] | None = None) -> Stages:
    """The stages of a captured call."""
    graph = captured.graph
    if len(graph.outputs) != 1 or graph.tensor[graph.outputs[0]].shape:
        raise StageError(
            f"a pipeline needs a module that returns its loss, a scalar; this one returns"
            f" {len(graph.outputs)} tensors, the first of shape"
            f" {graph.tensor[graph.outputs[0]].shape}: compute the loss inside the module"
        )
    if cuts is None:
        cuts = balanced_cuts(graph, stages, operator_work(graph, analyze(graph)))
    elif len(cuts) != stages - 1:
        raise StageError(f"{stages} stages need {stages - 1} cuts; {len(cuts)} were given")
    return Stages(captured, split(graph, cuts))


class StageModule(nn.Module):
    """The parameters that live on a stage, under the module's names, and what runs there."""

    def __init__(
        self, stages: Stages, index: int, model: nn.Module, device: torch.device, seed: int
    ) -> None:
        super().__init__()
        stage = stages.parts[index]
        self._sw_stage = stage
        self._sw_device = device
        self._sw_trained: list[str] = []
        self._sw_constants: dict[str, torch.Tensor] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        persistent = frozenset(model.state_dict())
        graph = stage.graph
        for leaf in graph.leaves:
            if leaf.kind is LeafKind.PARAMETER:
                trained = graph.tensor[leaf.name].requires_grad
                whole = _copied(parameters[leaf.keys[0]], device)
                parameter = nn.Parameter(whole, requires_grad=trained)
                for key in leaf.keys:
                    holder, name = _holder(self, key)
                    holder.register_parameter(name, parameter)
                if trained:
                    self._sw_trained.append(leaf.name)
            elif leaf.kind is LeafKind.BUFFER:
                buffer = _copied(buffers[leaf.keys[0]], device)
                for key in leaf.keys:
                    holder, name = _holder(self, key)
                    holder.register_buffer(name, buffer, persistent=key in persistent)
            elif leaf.kind is LeafKind.CONSTANT:
                self._sw_constants[leaf.name] = stages.captured.constants[leaf.name].to(device)
        self._sw_program = _program(stage, stages.analysis, device)
        self.register_buffer("_sw_random", random_state(seed, 0, device), persistent=False)
        self.train(model.training)

    @property
    def stage(self) -> Stage:
        return self._sw_stage

    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient here, in the order in which `run` takes weights."""
        return [self.get_parameter(name) for name in self._sw_trained]

    def run(
        self,
        weights: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        batch: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """What the stage hands on, or returns, with `weights` in place of its trained parameters.

        In training mode buffers are updated, and random numbers go on to the next step's.
        """
        graph = self._sw_stage.graph
        given = dict(zip(self._sw_trained, weights, strict=True))
        given |= dict(zip(self._sw_stage.received, received, strict=True))
        updated = [buffer for buffer, _ in graph.updates]
        leaves = []
        for leaf in graph.leaves:
            if leaf.name in given:
                leaves.append(given[leaf.name])
            elif leaf.kind is LeafKind.PARAMETER:
                leaves.append(self.get_parameter(leaf.keys[0]))
            elif leaf.kind is LeafKind.BUFFER:
                buffer = self.get_buffer(leaf.keys[0])
                # Autograd may keep what it read of a buffer that is updated in place below.
                leaves.append(buffer.clone() if leaf.name in updated else buffer)
            elif leaf.kind is LeafKind.CONSTANT:
                leaves.append(self._sw_constants[leaf.name])
            else:
                leaves.append(batch[leaf.keys[0]])
        state = self.get_buffer("_sw_random")
        results = self._sw_program(*leaves, state)
        outputs = results[: len(graph.outputs)]
        if self.training:
            with torch.no_grad():
                for name, value in zip(updated, results[len(outputs) :], strict=True):
                    self.get_buffer(name).copy_(value)
            # Not in place: what autograd keeps of this step may still read the old one.
            self._sw_random = state + state.new_tensor([0, 1])
        return tuple(outputs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths, in the call, of the batch's tensors that the stage reads."""
        leaves = self._sw_stage.graph.leaves_of(LeafKind.INPUT)
        return tuple(leaf.keys[0] for leaf in leaves if not leaf.keys[0].startswith(RECEIVED))

    def get_extra_state(self) -> dict[str, int]:
        """The number of mini-batches seen, which random numbers depend on."""
        return {"minibatches": int(self._sw_random[1])}

    def set_extra_state(self, state: dict[str, int]) -> None:
        seed = int(self._sw_random[0])
        self._sw_random = random_state(seed, state["minibatches"], self._sw_device)


def _program(stage: Stage, analysis: Analysis, device: torch.device) -> nn.Module:
    """Every operator whole, nothing communicated."""
    graph = stage.graph
    program = with_casts(lower(graph, analysis, everything_whole(graph), rank=0), graph)

    def make(instruction: Special) -> nn.Module:
        if isinstance(instruction, Dropout):
            return GlobalDropout(instruction, device)
        assert isinstance(instruction, Uniform)  # on one device nothing is redistributed
        return GlobalUniform(instruction, device)

    return to_module(program, device, make)


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A contiguous copy in memory of its own."""
    whole = tensor.detach().to(device)
    return whole.clone(memory_format=torch.contiguous_format)


def _holder(root: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor `key`, made on the way, and the tensor's name in it."""
    *path, name = key.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root, name
