"""One of the repeated layers: its operators in order, the parts that devices hold, collectives.

The data of a picture that the report draws: tensors as rectangles, cut where devices hold different
parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwright.ir.layout import Layout
from shardwright.ir.plan import Phase, Plan, PlannedOp, PlannedTransfer
from shardwright.report.text.module_rows import ModuleRow, moves_data, tiling_words

T = TypeVar("T")
_LEAST = 0.03  # of the layer's compute time: cheaper operators without weights are left out


@dataclass(frozen=True, slots=True)
class DrawnTensor:
    """A tensor and its placement per mesh axis: `R`, `P`, `S(0)`, `S(1.2)`."""

    name: str
    placements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerStep:
    """An operator of the layer.

    Attributes:
        module: its module, relative to the layer; empty for the layer itself.
        kind: the operator.
        splits: what each axis splits, in words.
        parameters: the parameters that it reads, as they are stored.
        result: its first result.
        before: collectives that move what it reads, in the forward pass.
        backward: collectives of the backward pass: of its operands again, and of gradients.
    """

    module: str
    kind: str
    splits: str
    parameters: tuple[DrawnTensor, ...]
    result: DrawnTensor
    before: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerPicture:
    """A layer, how many there are like it, the axes that its devices form, and its operators."""

    name: str
    count: int
    axes: tuple[tuple[str, int], ...]
    steps: tuple[LayerStep, ...]


def layer_picture(plan: Plan, tree: ModuleRow[T]) -> LayerPicture | None:
    """The repeated module of `tree` with the most compute time; None if nothing repeats."""
    ops: defaultdict[str, list[PlannedOp]] = defaultdict(list)
    for row in _repeated(tree):
        prefix = f"{row.path}."
        ops[row.path] = [op for op in plan.ops if f"{op.source.module}.".startswith(prefix)]

    def seconds(row: ModuleRow[T]) -> float:
        return row.count * sum(op.seconds for op in ops[row.path])

    chosen = max(_repeated(tree), key=seconds, default=None)
    if chosen is None or not ops[chosen.path]:
        return None
    steps = _steps(plan, ops[chosen.path], f"{chosen.path}.")
    return LayerPicture(chosen.name, chosen.count, plan.layout_mesh.axes, steps)


def _repeated(tree: ModuleRow[T]) -> list[ModuleRow[T]]:
    """The outermost rows that stand for several modules."""
    if tree.count > 1:
        return [tree]
    return [row for child in tree.children for row in _repeated(child)]


def _steps(plan: Plan, ops: Sequence[PlannedOp], prefix: str) -> tuple[LayerStep, ...]:
    layouts = {parameter.name: parameter.layout for parameter in plan.parameters}
    moved: defaultdict[str, list[PlannedTransfer]] = defaultdict(list)
    for transfer in plan.transfers:
        moved[transfer.consumer].append(transfer)
    kinds = {op.name: op.kind for op in plan.ops}
    whole = sum(op.seconds for op in ops)
    found = []
    for op in ops:
        parameters = tuple(
            _drawn(name.removeprefix(prefix).rpartition(".")[2], layouts[name])
            for name in dict.fromkeys(op.reads)
            if name in layouts
        )
        before, backward = _collectives(moved[op.name], kinds)
        if parameters or before or backward or op.seconds > _LEAST * whole:
            module = f"{op.source.module}.".removeprefix(prefix).rstrip(".")
            result = _drawn("result", op.layout)
            words = tiling_words(op)
            found.append(LayerStep(module, op.kind, words, parameters, result, before, backward))
    return _merged(found)


def _merged(steps: Sequence[LayerStep]) -> tuple[LayerStep, ...]:
    """`steps` with neighbours as one that move nothing and differ in their operator alone."""
    found: list[LayerStep] = []
    for step in steps:
        last = found[-1] if found else None
        plain = not (step.parameters or step.before or step.backward)
        if last is not None and plain and replace(step, kind=last.kind) == last:
            found[-1] = replace(last, kind=f"{last.kind}, {step.kind}")
        else:
            found.append(step)
    return tuple(found)


def _collectives(
    transfers: Sequence[PlannedTransfer], kinds: dict[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The collectives of the forward and of the backward pass, with the value that they move."""
    found: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for transfer in transfers:
        moving = [one for one in transfer.collectives if moves_data(one)]
        if not moving:
            continue
        value = kinds.get(transfer.value.partition(".")[0]) or kinds.get(transfer.value)
        name = value or transfer.value.rpartition(".")[2]
        gradient = "the gradient of " if transfer.phase is Phase.BACKWARD else ""
        text = f"{' + '.join(moving)} of {gradient}"
        found[transfer.phase is Phase.FORWARD, text].append(name)
    forward, backward = (
        tuple(
            text + ", ".join(dict.fromkeys(names))
            for (is_forward, text), names in found.items()
            if is_forward == wanted
        )
        for wanted in (True, False)
    )
    return forward, backward


def _drawn(name: str, layout: Layout) -> DrawnTensor:
    return DrawnTensor(name, tuple(map(str, layout.placements)))
