"""Compares two plans module by module.

Differences are "second minus first". The modules of both plans form one tree; unchanged modules are
left out, repeats are folded.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwright.ir.plan import Plan
from shardwright.report.choice import PeakParts, StepParts
from shardwright.report.text.explain import SMALL_SHARE
from shardwright.report.text.module_rows import (
    Costs,
    Module,
    ModuleRow,
    fold,
    module_tree,
    stored,
    tiling_words,
)
from shardwright.report.text.module_transfers import TransferReader

_NOTICED = 1e-3  # share of the first plan's step or memory from which on a row is shown


class Total(NamedTuple):
    """One figure of both plans, in seconds or bytes."""

    name: str
    first: float
    second: float
    unit: str  # "s" or "B"
    part: bool = False  # of the figure above it


@dataclass(frozen=True, slots=True)
class Change:
    """The changes in a module itself, and the difference of costs of its whole subtree.

    `costs` are differences; `texts` such as `weight: R -> dp:S(0)`.
    """

    costs: Costs
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two plans; `settings` are their fields that differ.

    `modules` is the tree of changed modules, None if no module differs.
    """

    settings: tuple[tuple[str, str, str], ...]
    totals: tuple[Total, ...]
    modules: ModuleRow[Change] | None

    @property
    def is_empty(self) -> bool:
        same = all(total.first == total.second for total in self.totals)
        return same and not self.settings and self.modules is None


def difference(first: Plan, second: Plan) -> Difference:
    """The differences of `second` from `first`, and their costs."""
    trees = module_tree(first), module_tree(second)
    joint = Module()
    for tree in trees:
        _outline(tree, joint)
    worth = _noticed(first)
    modules = _kept(fold(joint, _describe(first, second, *trees)), worth)
    return Difference(tuple(_settings(first, second)), tuple(_totals(first, second)), modules)


def _outline(tree: Module, joint: Module) -> None:
    """Add the modules of `tree` to `joint`, so that `fold` does not treat one child as a list."""
    joint.parameters += tree.parameters
    joint.ops += tree.ops
    joint.transfers += tree.transfers
    joint.memory += tree.memory
    joint.rest += tree.rest
    for name, child in tree.children.items():
        _outline(child, joint.children.setdefault(name, Module()))


def _describe(
    first: Plan, second: Plan, before: Module, after: Module
) -> Callable[[str, Module], Change]:
    moves = TransferReader(first), TransferReader(second)
    named = _axes_as(first, second)

    def describe(path: str, joint: Module) -> Change:
        one, other = before.at(path), after.at(path)
        if joint.is_rest:
            was, now = (_part(tree, joint.rest) for tree in (one, other))
            return Change(now.costs.minus(was.costs), ())
        big = _big(one, other)
        texts = [
            *_changed(_stores(one), _named(_stores(other), named)),
            *_changed(_splits(one, big), _named(_splits(other, big), named)),
            *_moved(_moves(path, one, moves[0]), _moves(path, other, moves[1], named)),
        ]
        return Change(other.costs.minus(one.costs), tuple(texts))

    return describe


def _part(model: Module, parts: Iterable[str]) -> Module:
    """The costs outside of modules that belong to some parts."""
    return Module(rest=Counter({part: model.rest[part] for part in parts}))


def _stores(module: Module) -> dict[str, str]:
    return {p.name.rpartition(".")[2]: stored(p) for p in module.parameters}


def _splits(module: Module, kinds: Iterable[str]) -> dict[str, str]:
    """The splits of all operators of these kinds, and whether they are recomputed or kept."""
    found: dict[str, list[str]] = {name: [] for name in kinds}
    for op in module.ops:
        if op.kind in found:
            found[op.kind].append(
                tiling_words(op) + " recomputed" * op.runs_again + " kept" * op.kept
            )
    return {name: ", ".join(_counted(texts)) for name, texts in found.items()}


def _big(*modules: Module) -> dict[str, None]:
    """Kinds of operators that take a noticeable part of the own time of one of these modules."""
    found: dict[str, None] = {}
    for module in modules:
        total = sum(op.seconds for op in module.ops)
        seconds: defaultdict[str, float] = defaultdict(float)
        for op in module.ops:
            seconds[op.kind] += op.seconds
        found.update((name, None) for name in seconds if seconds[name] >= SMALL_SHARE * total)
    return found


def _counted(texts: list[str]) -> Iterator[str]:
    for text, count in Counter(texts).items():
        yield f"{count} x {text}" if count > 1 else text


def _changed(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Names whose value differs; those with equal changes share a line."""
    by_change: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name, "none"), after.get(name, "none")
        if was != now:
            by_change.setdefault((was, now), []).append(name)
    for (was, now), names in by_change.items():
        yield f"{' '.join(names)}: {was} -> {now}"


def _moves(
    path: str, module: Module, reader: TransferReader, named: Callable[[str], str] = str
) -> dict[str, float]:
    """The seconds of the collectives of a module, by kind and what they move."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for move in reader.of(module.transfers, path):
        seconds[named(move.kind)] += move.seconds
    return seconds


def _named(texts: dict[str, str], named: Callable[[str], str]) -> dict[str, str]:
    return {name: named(text) for name, text in texts.items()}


def _moved(before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
    """Collectives that only one of the plans runs here, with their time."""
    for text in before:
        if text not in after:
            yield f"drops {text}, -{before[text] * 1e3:.2f} ms"
    for text in after:
        if text not in before:
            yield f"adds {text}, +{after[text] * 1e3:.2f} ms"


def _axes_as(first: Plan, second: Plan) -> Callable[[str], str]:
    """Texts of the second plan with the axes of the first: names follow from what they split.

    They are equal axes of the machine where both meshes have one shape.
    """
    one, other = first.layout_mesh, second.layout_mesh
    if one.shape != other.shape or one.names == other.names:
        return str
    names = dict(zip(other.names, one.names, strict=True))
    axis = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, names))})(?=[:\s]|$)")
    return lambda text: axis.sub(lambda found: names[found[1]], text)


def _noticed(plan: Plan) -> Costs:
    """The smallest differences of costs for which a module gets a row."""
    memory, seconds = int(_NOTICED * plan.peak_bytes), _NOTICED * plan.step_seconds
    return Costs(memory, memory, memory, seconds, seconds)


def _kept(node: ModuleRow[Change], worth: Costs) -> ModuleRow[Change] | None:
    """The node with its changed children; None if nothing changed."""
    children = tuple(kept for child in node.children if (kept := _kept(child, worth)))
    costs = zip(node.content.costs, worth, strict=True)
    if not children and not node.content.texts and not any(abs(c) > w for c, w in costs):
        return None
    return ModuleRow(node.name, node.path, node.count, node.content, children)


def _settings(first: Plan, second: Plan) -> Iterator[tuple[str, str, str]]:
    """The fields that differ and are not costs, as (name, first, second)."""
    both = (
        ("machine", first.machine, second.machine),
        ("mesh", str(first.mesh), str(second.mesh)),
        ("optimizer", first.optimizer, second.optimizer),
        ("stages", str(first.stages), str(second.stages)),
        ("schedule", first.schedule, second.schedule),
        ("micro-batches", str(first.micro_batches), str(second.micro_batches)),
        ("offload", ", ".join(first.offload), ", ".join(second.offload)),
        ("segments with inputs on the device", _on_device(first), _on_device(second)),
        ("bytes updated at once", _at_once(first), _at_once(second)),
        ("buckets gathered ahead", str(first.ahead), str(second.ahead)),
        (
            "gathers on their own communicator",
            _on_off(first.separates_gathers),
            _on_off(second.separates_gathers),
        ),
        ("inputs", _inputs(first), _inputs(second)),
        ("rng", first.numerics.rng, second.numerics.rng),
        ("batch norm", first.numerics.batch_norm, second.numerics.batch_norm),
        ("precision", first.numerics.precision, second.numerics.precision),
        ("sums of gradients", first.numerics.reduce, second.numerics.reduce),
        ("chunks of the loss", str(first.numerics.loss_chunks), str(second.numerics.loss_chunks)),
        ("chunks of MLPs", str(first.numerics.mlp_chunks), str(second.numerics.mlp_chunks)),
        ("asynchronous tensor parallelism", _on_off(first.async_tp), _on_off(second.async_tp)),
        ("overlap of expert messages", _on_off(first.ep_overlap), _on_off(second.ep_overlap)),
        ("products in 8 bits", first.numerics.fp8 or "none", second.numerics.fp8 or "none"),
        ("graph", first.fingerprint, second.fingerprint),
    )
    yield from (setting for setting in both if setting[1] != setting[2])


def _on_off(switch: bool) -> str:
    return "on" if switch else "off"


def _on_device(plan: Plan) -> str:
    return ", ".join(map(str, plan.on_device))


def _at_once(plan: Plan) -> str:
    return str(plan.update_group_bytes) if plan.update_group_bytes else "all"


def _inputs(plan: Plan) -> str:
    return ", ".join(f"{i.key} {i.dtype}{list(i.shape)}" for i in plan.inputs)


def _totals(first: Plan, second: Plan) -> Iterator[Total]:
    yield Total("step time", first.step_seconds, second.step_seconds, "s")
    one, other = StepParts.of(first), StepParts.of(second)
    for name, a, b in zip(StepParts._fields, one, other, strict=True):
        yield Total(name, a, b, "s", part=True)
    rest = first.step_seconds - sum(one), second.step_seconds - sum(other)
    if any(abs(seconds) > 1e-9 for seconds in rest):
        yield Total("waiting or overlapped", rest[0], rest[1], "s", part=True)
    yield Total("peak memory", first.peak_bytes, second.peak_bytes, "B")
    for name, a, b in zip(
        PeakParts._fields, PeakParts.of(first), PeakParts.of(second), strict=True
    ):
        yield Total(name.replace("_", " "), a, b, "B", part=True)
