"""Captures the graph of each mode of a model, train or eval, and of smaller batches, on first use.

A graph computes what the model computes in the mode in which it was captured: the behaviour of
batch norm, dropout and `if self.training` is fixed. A parallel module keeps the model's structure
without weights, switches it when the user switches the module, and captures it again if the mode of
a sub-module differs. The new graph runs by the same plan, on the same parameters and buffers. A
batch of fewer rows, such as the last one of an epoch, has a graph of its own in each mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn

from shardwright.ir.graph import OPAQUE, Graph, LeafKind, Op
from shardwright.ir.plan import InputSpec, PlanError
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.runtime.plan_transfer import same_without_dropout, with_last
from shardwright.tracing.arguments import BatchError
from shardwright.tracing.call import CaptureError, example_call
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.export.opaque import without_weights
from shardwright.tracing.graph_builder import Captured

Flags = tuple[bool, ...]  # `training` of every module


@dataclass(frozen=True)
class ModeModule:
    """The module of a mode and batch: `module`, or the one that was planned.

    Dropout is in it only if `draws`. `error` is why the mode cannot run.
    """

    module: Any = None
    draws: bool = True
    error: str = ""


@final
class Modes:
    """The modes of one parallel module.

    `capture` captures a model in the mode it is in, with so many rows of the batch or all, `make`
    makes the module of another graph than the planned one, which is `planned`; it runs on what
    `owner` holds. `owner` is given with each call too: a copy of it has a copy of its modes.
    """

    def __init__(
        self,
        owner: nn.Module,
        model: nn.Module,
        planned: Captured,
        capture: Callable[[nn.Module, int | None], Captured],
        make: Callable[[Captured, Any, int | None], nn.Module],
    ) -> None:
        self.planned, self.capture, self.make = planned, capture, make
        self.structure = without_weights(model)
        self.is_copy = self.structure is not model
        if not self.is_copy:
            self.structure = _outline(model)
        self.modules = list(self.structure.modules())
        self.pairs: list[tuple[nn.Module, nn.Module]] = []  # of the parallel module, of the model
        self.now = self.flags()
        # Parameters that the plan took for frozen, by their first name, with all of their names.
        self.frozen = {
            leaf.name: leaf.keys
            for leaf in planned.graph.leaves_of(LeafKind.PARAMETER)
            if not planned.graph.tensor[leaf.name].requires_grad
        }
        self.unfrozen: tuple[str, ...] = ()
        self.known: dict[tuple[Flags, tuple[str, ...], int | None], ModeModule] = {
            (self.now, (), None): ModeModule()
        }
        # These cannot be captured without weights and constants in their memory.
        if planned.opaque or planned.constants or not self.is_copy:
            self._capture_now(owner, model)

    def flags(self) -> Flags:
        return tuple(module.training for module in self.modules)

    def attach(self, owner: nn.Module) -> None:
        """Make `train()` and `eval()` of `owner`'s sub-modules with parameters switch modes."""
        theirs = dict(self.structure.named_modules(remove_duplicate=False))
        named = owner.named_modules()
        self.pairs = [(ours, theirs[name]) for name, ours in named if name and name in theirs]
        self._show(owner)

    def switch(self, owner: nn.Module, mode: bool) -> None:
        """Switch the mode as the model's own `train(mode)` does, which it may define itself."""
        self.structure.train(mode)
        self._show(owner)
        self.now = self.flags()

    def running(self, owner: nn.Module, rows: int | None = None) -> ModeModule:
        """The module of the current mode, for the planned batch or for one of so many rows.

        Raises `PlanError` if none can run in it, `BatchError` if none can run that many rows.
        """
        switched = [
            (ours, theirs) for ours, theirs in self.pairs if ours.training != theirs.training
        ]
        for ours, theirs in switched:  # outer ones first, which take the inner ones along
            theirs.train(ours.training)
        if switched:
            self.now = self.flags()
        if self.frozen and torch.is_grad_enabled():
            self._follow(owner)
        key = self.now, self.unfrozen, rows
        if key not in self.known:
            self.known[key] = self._found(owner, self.structure, rows)
        found = self.known[key]
        if found.error and rows is not None:
            raise BatchError(
                f"the batch has {rows} rows, for which the planned model cannot be captured"
                f" ({found.error}); leave it out (drop_last=True), or pad it"
            )
        if found.error:
            raise PlanError(found.error)
        return found

    def _follow(self, owner: Any) -> None:
        """Take note of parameters that were frozen and require a gradient now."""
        tensor, places = owner._sw_holds.tensor, owner._sw_holds.places
        now = tuple(name for name in self.frozen if name in places and tensor(name).requires_grad)
        if now != self.unfrozen:
            self.unfrozen = now
            if self.is_copy:
                for name, keys in self.frozen.items():
                    for key in keys:
                        self.structure.get_parameter(key).requires_grad_(name in now)

    def _show(self, owner: nn.Module) -> None:
        owner.training = self.structure.training
        for ours, theirs in self.pairs:
            ours.training = theirs.training

    def _found(self, owner: nn.Module, model: nn.Module, rows: int | None = None) -> ModeModule:
        """The module of the mode that `model` is in, or the reason why there is none."""
        mode = "training" if model.training else "evaluation"
        if rows is not None and (not self.is_copy or self.planned.opaque or self.planned.constants):
            return ModeModule(error="its graph needs the values of weights or constants")
        if self.unfrozen and (not self.is_copy or self.planned.opaque or self.planned.constants):
            return ModeModule(
                error=f"{self.unfrozen[0]} was frozen when the plan was made and requires a"
                " gradient now, and the model cannot be captured again without its weights; plan"
                " it with requires_grad=True, and freeze it then"
            )
        if not self.is_copy and model is self.structure:
            return ModeModule(
                error=f"{mode} with sub-modules in modes of their own needs a copy of the model's"
                " structure, and it cannot be copied; switch the model before parallelize"
            )
        try:
            # These tensors outlive the call, which may be in inference mode.
            with torch.inference_mode(False), torch.enable_grad():
                captured = self.capture(model, rows)
                if rows is not None:
                    return ModeModule(self.make(captured, owner, rows))
                if _is_same(self.planned, captured):
                    return ModeModule()
                if not self.unfrozen and _is_same_without_dropout(self.planned, captured):
                    return ModeModule(draws=False)
                return ModeModule(self.make(captured, owner, None))
        except (CaptureError, PipelineError, PlanError) as e:
            return ModeModule(error=f"the model cannot run in {mode} mode under this plan: {e}")

    def _capture_now(self, owner: nn.Module, model: nn.Module) -> None:
        """Capture what `eval()` and `train()` will need while the model has its weights."""
        before = [(module, module.training) for module in model.modules()]
        own = [(module, module.training) for module in self.modules]
        for mode in (False, True):
            model.train(mode)
            self.structure.train(mode)
            if (key := (self.flags(), (), None)) not in self.known:
                self.known[key] = self._found(owner, model)
            for module, training in (*before, *own):
                module.training = training


def with_rows(inputs: Sequence[InputSpec], rows: int | None) -> list[InputSpec]:
    """`inputs` of a batch of so many rows; None: as they are.

    The first input with dimensions says how many rows the batch has.
    """
    planned = next((spec.shape[:1] for spec in inputs if spec.shape), ())
    if rows is None:
        return list(inputs)
    return [
        replace(spec, shape=(rows, *spec.shape[1:])) if spec.shape[:1] == planned else spec
        for spec in inputs
    ]


def recapture(graph: Graph, outputs: str = "loss") -> Callable[[nn.Module, int | None], Captured]:
    """A function that captures the call of `graph` again, with the loss or all that is returned.

    It takes the model, and the number of rows of another batch, or None.
    """
    tensors = ((leaf.keys[0], graph.tensor[leaf.name]) for leaf in graph.leaves_of(LeafKind.INPUT))
    inputs = [InputSpec(key, t.shape, t.dtype, t.requires_grad) for key, t in tensors]

    def capture(model: nn.Module, rows: int | None) -> Captured:
        args, kwargs = example_call(with_rows(inputs, rows), graph.constants)
        found = capture_with_rules(model, args, kwargs, graph.numerics, outputs)
        if found.returned is None:
            return found
        main = [found.graph.outputs[i] for i in found.returned.main]
        return replace(found, graph=with_last(found.graph, main))

    return capture


def evaluates_without_dropout(structure: nn.Module, graph: Graph) -> bool:
    """Whether evaluation is `graph`, which is that of training, without dropout.

    Both are captured with fused attention, which takes its dropout as a number.
    """
    if graph.updates:
        return False
    fused = replace(graph, numerics=replace(graph.numerics, rng="fast"))
    modes = [(module, module.training) for module in structure.modules()]
    try:
        trained = recapture(fused)(structure, None).graph
        evaluated = recapture(fused)(structure.eval(), None).graph
    except CaptureError:  # cannot be determined without weights
        return False
    finally:
        for module, training in modes:
            module.training = training
    return same_without_dropout(_undropped(trained), _undropped(evaluated))


@final
class WithoutDropout:
    """Evaluation by the training graph, for modules without a graph of evaluation."""

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.structure, self.graph, self.checked = without_weights(model), graph, False

    def check(self) -> None:
        """Raise `PlanError` for a model that does something else in evaluation."""
        if not self.checked and not evaluates_without_dropout(self.structure, self.graph):
            raise PlanError(
                "stages of an asynchronous pipeline are evaluated by what trains them, and"
                " evaluating this model is more than to leave dropout out; leave Job.evaluation out"
                " and evaluate what is saved, or plan without --async"
            )
        self.checked = True


def _undropped(graph: Graph) -> Graph:
    """`graph` whose attention drops nothing."""

    def without(op: Op) -> Op:
        if op.kind != "scaled_dot_product_attention":
            return op
        args = tuple(0.0 if i == 4 else arg for i, arg in enumerate(op.args))
        kwargs = tuple((key, arg) for key, arg in op.kwargs if key != "dropout_p")
        return replace(op, args=args, kwargs=kwargs)

    return replace(graph, ops=tuple(map(without, graph.ops)))


def _is_same(planned: Captured, other: Captured) -> bool:
    """Whether the graphs are equal; constants and modules kept whole cannot be compared."""
    if planned.constants or other.constants or _has_whole(planned.graph) or _has_whole(other.graph):
        return False
    same = planned.graph.fingerprint == other.graph.fingerprint
    return same and _returned(planned) == _returned(other)


def _is_same_without_dropout(planned: Captured, other: Captured) -> bool:
    same = same_without_dropout(planned.graph, other.graph)
    return same and not other.constants and _returned(planned) == _returned(other)


def _returned(captured: Captured) -> Any:
    return captured.output_keys, captured.returned


def _has_whole(graph: Graph) -> bool:
    return any(op.target == OPAQUE for op in graph.ops)


def _outline(model: nn.Module) -> nn.Module:
    """Modules of the same names and modes, with nothing in them."""
    made = nn.Module()
    for name, child in model.named_children():
        made.add_module(name, _outline(child))
    made.training = model.training
    return made
