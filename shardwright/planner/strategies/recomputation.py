"""Maps a `Recompute` value to checkpoint segments of a graph, and to operators that they keep.

Each layer is a segment, except under `groups(n)`, where n layers are one segment, and under
`children` and `modules`, where each run of operators of one module is one. `ops` keeps operators
inside of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir.graph import Graph, Op
from shardwright.ir.options.constraints import matches
from shardwright.ir.strategy.recompute import Recompute, StrategyError, op_word
from shardwright.planner.space.assembly import FREE, Skeleton
from shardwright.planner.strategies.layers import (
    child_module,
    recomputable,
    recomputed_layers,
)
from shardwright.rules.operators.mlp_chunks import CHUNKED_MLP

BY_LAYER = ("none", "full", "every", "first")  # kinds that share the layers as segments
_COLLECTIVES = ("reduce_scatter", "all_to_all")  # sums of kept operators are kept with them
# Megatron-LM's names for parts of a layer that are not names of modules.
_PARTS: Mapping[str, Callable[[Op], bool]] = {
    "core_attn": lambda op: "attention" in op.kind,
    "layernorm": lambda op: "norm" in op.source.module.rpartition(".")[2],
}


@dataclass(frozen=True, slots=True)
class Recomputable:
    """The segments of a graph that a strategy may run again.

    Attributes:
        segments: ranges of operators.
        skeleton: the operators inside of them that run once, and how segments end.
        together: layers of each segment.
    """

    segments: tuple[range, ...]
    skeleton: Skeleton = FREE
    together: int = 1


def recomputable_by(recompute: Recompute, graph: Graph, layers: Sequence[range]) -> Recomputable:
    """The segments for `recompute`; raises `StrategyError` if this model has none of them."""
    kind = recompute.kind
    if kind == "groups" and recompute.count > 1:
        groups = tuple(_groups(layers, recompute.count))
        return Recomputable(recomputable(graph, groups), FREE, recompute.count)
    if kind in ("children", "modules"):
        inside = _in_children if kind == "children" else _in_modules(recompute.names)
        spans = recomputable(graph, tuple(_runs(graph, inside)))
        if not spans:
            raise StrategyError(
                f"recompute={recompute} finds no such module in this model; use full, every(n) or"
                " globs of module paths, such as modules(*.mlp)"
            )
        return Recomputable(spans, Skeleton(kept=_run_once(graph, spans), ends_again=True))
    spans = recomputable(graph, layers)
    if kind != "ops":
        return Recomputable(spans, Skeleton(kept=_run_once(graph, spans)))
    kept = _run_once(graph, spans).union(_kept(recompute.names, graph, spans))
    return Recomputable(spans, Skeleton(kept=kept, ends_again=True))


def _run_once(graph: Graph, spans: Sequence[range]) -> frozenset[str]:
    """MLPs in chunks at the end of a residual branch, with what is between them and its sum.

    They compute again what their own backward pass needs, and nothing else reads their results.
    """
    found = set[str]()
    for span in spans:
        inside = {graph.ops[i].name for i in span}
        for op in (graph.ops[i] for i in span):
            if op.target == CHUNKED_MLP:
                behind = _behind(graph, op.outputs[0], inside)
                found |= set() if behind is None else {op.name, *behind}
    return frozenset(found)


def _behind(graph: Graph, value: str, inside: set[str]) -> set[str] | None:
    """Operators that keep nothing, from a value to where it leaves a segment; None for others."""
    found = set[str]()
    for reader in graph.consumers[value]:
        if value in reader.saves:
            return None
        readers = (one.name for name in reader.outputs for one in graph.consumers[name])
        if inside.isdisjoint(readers):  # the residual sum, which does not run again
            continue
        if reader.saves or reader.extra_saved:
            return None
        found.add(reader.name)
        for name in reader.outputs:
            behind = _behind(graph, name, inside)
            if behind is None:
                return None
            found |= behind
    return found


def recomputed(
    recompute: Recompute,
    graph: Graph,
    layers: Sequence[range],
    possible: Recomputable,
    cuts: Sequence[int] = (),
) -> tuple[range, ...]:
    """The segments that are recomputed; `cuts` are those of the pipeline."""
    if recompute.kind == "budget":
        return _within_budget(recompute, graph, possible.segments)
    if recompute.kind in BY_LAYER:
        return recomputed_layers(recompute, layers, cuts)
    if not layers:
        recomputed_layers(recompute, layers, cuts)  # which says that there are none
    return possible.segments


def _groups(layers: Sequence[range], count: int) -> Iterator[range]:
    """Ranges of `count` consecutive layers; layers that are not adjacent are not joined."""
    for first in range(0, len(layers), count):
        group = layers[first : first + count]
        if all(one.stop == other.start for one, other in itertools.pairwise(group)):
            yield range(group[0].start, group[-1].stop)
        else:
            yield from group


def _in_children(op: Op) -> str:
    return child_module(op.source.module)


def _in_modules(names: Sequence[str]) -> Callable[[Op], str]:
    def inside(op: Op) -> str:
        """The path of the layer whose named modules contain an operator; "" if none does."""
        path = op.source.module
        for name in names:
            part = _PARTS.get(name)
            if part(op) if part else matches(name, path) or matches(f"*.{name}", path):
                return f"{name} {child_module(path) or path}"
        return ""

    return inside


def _runs(graph: Graph, inside: Callable[[Op], str]) -> Iterator[range]:
    """Runs of operators for which `inside` returns the same non-empty text."""
    numbered = ((i, inside(op)) for i, op in enumerate(graph.ops))
    for text, run in itertools.groupby(numbered, key=lambda one: one[1]):
        numbers = [i for i, _ in run]
        if text:
            yield range(numbers[0], numbers[-1] + 1)


def _kept(names: Sequence[str], graph: Graph, layers: Sequence[range]) -> Iterator[str]:
    """The operators of each layer with these `names`; `NAME/n` means the first of every n."""
    rules = [(name, int(every or 1)) for name, _, every in (n.partition("/") for n in names)]
    found = False
    for layer in layers:
        seen = dict.fromkeys(names, 0)
        for op in (graph.ops[i] for i in layer):
            for word, (name, every) in zip(names, rules, strict=True):
                if _is_named(op, name):
                    seen[word] += 1
                    if (seen[word] - 1) % every == 0:
                        found = True
                        yield op.name
    if layers and not found and not all(name in _COLLECTIVES for name, _ in rules):
        raise StrategyError(
            f"recompute=ops({','.join(names)}) names no operator of this model's layers; use names"
            " such as mm, attention or topk, or full"
        )


def _is_named(op: Op, name: str) -> bool:
    return name in (op.kind, op_word(op.kind))


def _within_budget(
    recompute: Recompute, graph: Graph, layers: Sequence[range]
) -> tuple[range, ...]:
    """The fewest evenly spaced layers to recompute so that the rest keeps at most the budget."""
    saved = [_saved(graph, layer) for layer in layers]
    freed = [size - _taken(graph, layer) for size, layer in zip(saved, layers, strict=True)]
    more = _saved(graph, range(len(graph.ops))) * (1 - recompute.fraction)
    for count in range(len(layers) + 1):
        chosen = [
            i
            for i in range(len(layers))
            if (i + 1) * count // len(layers) > i * count // len(layers)
        ]
        if sum(freed[i] for i in chosen) >= more:
            return tuple(layers[i] for i in chosen)
    least = 1 - sum(freed) / max(1, _saved(graph, range(len(graph.ops))))
    raise StrategyError(
        f"recompute={recompute} is less than what recomputing every layer leaves, {least:.2f} of"
        " the activations; use full, or a larger budget"
    )


def _saved(graph: Graph, span: range) -> int:
    """Bytes that autograd saves for operators of a range, each result once."""
    names = {n for i in span for n in graph.ops[i].saves if n in graph.producer}
    extra = sum(graph.ops[i].extra_saved for i in span)
    return extra + sum(graph.tensor[n].bytes for n in names if not graph.tensor[n].alias_of)


def _taken(graph: Graph, span: range) -> int:
    """Bytes of the activations that a range reads."""
    made = {n for i in span for n in graph.ops[i].outputs}
    taken = {n for i in span for n in graph.ops[i].operands if n in graph.producer} - made
    return sum(graph.tensor[n].bytes for n in taken if graph.tensor[n].requires_grad)
