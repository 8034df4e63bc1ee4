"""Finds the layers of a graph, as ranges of operators, for recomputation and stage cuts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.strategy.recompute import Recompute, StrategyError
from shardwright.planner.space.repeats import Repeat

_NUMBERED = re.compile(r"(.*?\.)?(\d+)(\.|$)")


def layers_of(graph: Graph, repeats: Sequence[Repeat]) -> tuple[range, ...]:
    """The layers of `graph` as ranges of operator indices, in order; empty if it has none.

    They are the layers of its `repeats`. A graph with too few layers for repeats has as layers its
    outermost numbered modules, such as `model.layers.0`.
    """
    if repeats:
        return tuple(layer for repeat in repeats for layer in repeat.every_layer())
    found: dict[str, range] = {}
    for i, op in enumerate(graph.ops):
        match = _NUMBERED.match(op.source.module)
        if match is not None:
            path = match[0].rstrip(".")
            found[path] = range(found[path].start if path in found else i, i + 1)
    spans = sorted(found.values(), key=lambda span: span.start)
    disjoint = all(one.stop <= other.start for one, other in itertools.pairwise(spans))
    return tuple(spans) if disjoint else ()


def child_module(path: str) -> str:
    """The child module of a layer that contains a path; "" for a layer itself and outside layers.

    >>> child_module("model.layers.0.mlp.up_proj"), child_module("model.layers.0")
    ('model.layers.0.mlp', '')
    """
    match = _NUMBERED.match(path)
    if match is None or match.end() >= len(path):
        return ""
    return path[: match.end()] + path[match.end() :].partition(".")[0]


def recomputable(graph: Graph, layers: Sequence[range]) -> tuple[range, ...]:
    """The layers that may be recomputed.

    Layers with an opaque module are excluded, because it may change state of its own, and so is a
    layer at the end of the graph, because its backward pass begins as soon as it has run.
    """
    return tuple(
        layer
        for layer in layers
        if layer.stop < len(graph.ops) and all(graph.ops[i].kind != "opaque" for i in layer)
    )


def recomputed_layers(
    recompute: Recompute, layers: Sequence[range], cuts: Sequence[int] = ()
) -> tuple[range, ...]:
    """The layers that `recompute` recomputes; `cuts` are those of the pipeline.

    `every(n)` counts from the first layer of the model, as torchtitan does: the n-th is the first
    that is recomputed. `first(n)` counts in each stage.
    """
    if recompute.kind == "none":
        return ()
    if not layers:
        raise StrategyError(
            f"recompute={recompute} counts layers, and this model has no repeated layers; use none"
        )
    if recompute.kind == "every":
        return tuple(layers[recompute.count - 1 :: recompute.count])
    if recompute.kind == "first":
        ends = [0, *cuts, max(layer.stop for layer in layers)]
        stages = itertools.pairwise(ends)
        inside = ([one for one in layers if a <= one.start < b] for a, b in stages)
        return tuple(one for stage in inside for one in stage[: recompute.count])
    return tuple(layers)


def cuts_of(stage_cut: Sequence[int], layers: Sequence[range]) -> tuple[int, ...]:
    """The operators at which the second and later stages begin, given the layers of each stage.

    Raises `StrategyError` if the layers do not add up to those of the model, or a stage has none.
    """
    if sum(stage_cut) != len(layers) or not all(stage_cut):
        raise StrategyError(
            f"stage_cut={','.join(map(str, stage_cut))} are {sum(stage_cut)} layers and the model"
            f" has {len(layers)}; give every stage one or more, {len(layers)} in all"
        )
    found, before = [], 0
    for count in stage_cut[:-1]:
        before += count
        found.append(layers[before].start)
    return tuple(found)
