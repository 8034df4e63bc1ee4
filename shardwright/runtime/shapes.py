"""One module for batches of several shapes: a program for each, the same parameters in all.

A captured graph has the shapes of its batch. A last, smaller batch, or sequences
of another length, are captured again and run by the same plan: parameters stay
where they are, every operator is split as before, and where that would leave a
device without work it is computed by all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from shardwright.capture.call import flatten, split_call
from shardwright.ir.plan import InputSpec, Plan, PlanError, PlannedOp
from shardwright.lower.discover import capture_with_rules
from shardwright.rules.analysis import analyze
from shardwright.rules.micro import MicroBatchError
from shardwright.rules.micro import micro_batches as micro_batched
from shardwright.rules.placing import feasible, parse_tiling, place, tiling_text
from shardwright.rules.rule import Rule
from shardwright.runtime.batch import BatchError
from shardwright.runtime.experts import Skew, skews
from shardwright.runtime.nonfinite import origin
from shardwright.runtime.parallel import ParallelModule, parallelize
from shardwright.runtime.pipeline import PipelineModule
from shardwright.runtime.stepping import SteppingModule, arguments

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of a call's tensors, by path


def plan_for_shapes(
    model: nn.Module, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Plan:
    """`plan` for a call of `model` with other shapes; raises `PlanError` if that is another graph.

    What it says of costs is still what was said of the shapes it was made for.
    """
    captured = capture_with_rules(model, args, kwargs, plan.habits)
    graph, analysis = captured.graph, analyze(captured.graph)
    if {op.name for op in graph.ops} != {op.name for op in plan.ops}:
        raise PlanError(
            f"the model does other things with a batch of {_text(shapes_of(args, kwargs))} than"
            " with the one that was planned for; give batches of the planned shape"
        )
    count = plan.micro_batches
    try:
        if count > 1:
            micro_batched(graph, analysis, count)
    except MicroBatchError:
        count = 1
    tensors, _ = split_call(args, kwargs)
    inputs = tuple(replace(spec, shape=tuple(tensors[spec.key].shape)) for spec in plan.inputs)
    ops = tuple(_feasible(op, analysis.rules[op.name], plan) for op in plan.ops)
    return replace(plan, fingerprint=graph.fingerprint, inputs=inputs, ops=ops, micro_batches=count)


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """Shapes of the tensors of a call."""
    leaves = flatten(args, kwargs).items()
    return tuple((key, tuple(v.shape)) for key, v in leaves if isinstance(v, torch.Tensor))


@final
class ManyShapes:
    """Parallel modules of one model for several shapes, which share parameters and buffers.

    `others` are calls of other shapes than the one `plan` was made for. Steps run through
    `torch.compile` if they are to be `compiled`.
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
    ) -> None:
        self.main: SteppingModule = _steps(model, plan, seed, device)
        self._modules: dict[Shapes, SteppingModule] = {_planned(plan.inputs): self.main}
        for args, kwargs in others:
            shapes = shapes_of(args, kwargs)
            if shapes not in self._modules:
                other_plan = plan_for_shapes(model, plan, args, kwargs)
                other = _steps(model, other_plan, seed, device)
                _share(self.main, other, shapes)
                self._modules[shapes] = other
        if compiled:
            for module in self._modules.values():
                module.compile_programs()

    @property
    def known(self) -> tuple[Shapes, ...]:
        """Shapes of whole batches that it takes, the planned ones first."""
        return tuple(self._modules)

    def module_for(self, batch: Any) -> SteppingModule:
        """The module that runs a batch of this shape, made ready to run.

        Raises `BatchError` if there is none. With one shape only it takes ranks' own parts too.
        """
        if len(self._modules) == 1:
            return self.main
        shapes = shapes_of(*arguments(batch))
        module = self._modules.get(shapes)
        if module is None:
            raise BatchError(
                f"the batch has {_text(shapes)}; known are {'; '.join(map(_text, self._modules))}:"
                " pad the batch, or name its shape before training starts"
            )
        if module is not self.main:
            module.train(self.main.training)
        return module

    def forward_backward(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch; its gradients are added to `grad`."""
        module = self.module_for(batch)
        module.set_random_state(self.main.random_state())
        loss = module.forward_backward(batch)
        self.main.set_random_state(module.random_state())
        return loss

    def origin_of_nonfinite(self, batch: Any, state: tuple[int, int]) -> str:
        """Which operator first makes NaN or infinity of `batch` in this random state."""
        module = self.module_for(batch)
        assert isinstance(module, ParallelModule | PipelineModule), "what `_steps` makes"
        return origin(module, batch, state)

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch, in the mode that the module is in."""
        args, kwargs = arguments(batch)
        module = self.module_for(batch)
        module.set_random_state(self.main.random_state())
        found: torch.Tensor = module(*args, **kwargs)
        self.main.set_random_state(module.random_state())
        return found

    def check_evaluation(self) -> None:
        """Raise `PlanError` for a model that cannot be evaluated by the graph that trains it."""
        if updated := self.main.updated_buffers:
            raise PlanError(
                f"the model writes its buffer {updated[0]} while it trains, so the graph that was"
                " captured cannot evaluate it; leave Job.evaluation out and evaluate what is saved"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.main.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.main.named_parameters()

    def lasting_buffers(self) -> dict[str, torch.Tensor]:
        return self.main.lasting_buffers()

    def random_state(self) -> tuple[int, int]:
        return self.main.random_state()

    def set_random_state(self, state: tuple[int, int]) -> None:
        self.main.set_random_state(state)

    def local_batch(self, batch: Any) -> Any:
        """This rank's part of a global batch of any of the shapes."""
        return self.module_for(batch).local_batch(batch)

    def skews(self) -> list[Skew]:
        """How unevenly rows were routed to experts."""
        return skews(list(self._modules.values()))

    def train(self, mode: bool = True) -> ManyShapes:
        self.main.train(mode)
        return self


def _steps(model: nn.Module, plan: Plan, seed: int, device: torch.device | None) -> SteppingModule:
    """The parallel module, whose steps are those of one device."""
    module = parallelize(model, plan, seed=seed, device=device)
    if not isinstance(module, SteppingModule):
        raise PlanError(
            f"schedule {plan.schedule!r} trains otherwise than one device does, and a job cannot"
            " ask for that yet; plan without it, or train by hand as docs/async.md says"
        )
    return module


def _share(main: SteppingModule, other: SteppingModule, shapes: Shapes) -> None:
    """Let `other` run on the parameters and buffers of `main`."""
    mine = dict(main.named_parameters(remove_duplicate=False))
    for name, parameter in list(other.named_parameters(remove_duplicate=False)):
        if parameter.shape != mine[name].shape:
            raise PlanError(
                f"with a batch of {_text(shapes)} the model takes {name} apart in another way"
                f" ({tuple(parameter.shape)}, not {tuple(mine[name].shape)}); give batches of the"
                " planned shape"
            )
        path, _, last = name.rpartition(".")
        other.get_submodule(path).register_parameter(last, mine[name])
    for name in {*main.lasting_buffers()}:
        path, _, last = name.rpartition(".")
        other.get_submodule(path).register_buffer(last, main.get_buffer(name))


def _feasible(op: PlannedOp, rule: Rule, plan: Plan) -> PlannedOp:
    """`op`, not split along the axes where a device would get nothing."""
    known = {tiling_text((choice,))[0] for choice in rule.choices()}
    words = [word if word in known else "-" for word in op.tiling]  # of size 1: not split at all
    for axis in reversed(range(len(words))):
        if feasible(rule, place(rule, parse_tiling(rule, tuple(words)), plan.layout_mesh)):
            break
        words[axis] = "-"
    return op if tuple(words) == op.tiling else replace(op, tiling=tuple(words))


def _planned(inputs: Sequence[InputSpec]) -> Shapes:
    return tuple((spec.key, spec.shape) for spec in inputs)


def _text(shapes: Shapes) -> str:
    return ", ".join(f"{key} {list(shape)}" for key, shape in shapes)
