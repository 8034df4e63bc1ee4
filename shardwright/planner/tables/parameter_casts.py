"""Prices the casts of a stored parameter to the dtype that it is read in, and of its gradient."""

from __future__ import annotations

import numpy as np

from shardwright.ir.graph import Graph
from shardwright.ir.options.fp8 import recipe_of
from shardwright.ir.options.mixed_precision import stored_bytes
from shardwright.planner.tables.layout_codes import Ints
from shardwright.planner.tables.objective import Floats, Objective


def cast_seconds(measure: Objective, graph: Graph, name: str, stored: Ints, read: Ints) -> Floats:
    """Seconds of the casts of a parameter and of its gradient, once a step: (K,).

    A weight that is gathered in 8 bits is cast on its shard, after a pass over it where its scale
    is that of its own maximum; its gradient is cast from the dtype of the products. The all-reduce
    of the maxima, one number for each weight, has no price.

    Args:
        measure: the objective.
        graph: the graph.
        name: the parameter.
        stored: bytes of its tile as it is stored, (K,).
        read: bytes of that tile as it is read, (K,).
    """
    trained, tensor = name in graph.trained, graph.tensor[name]
    if not tensor.gathered_as:
        differ = bool((stored != read).any())
        return measure.copies(stored + read, 1 + trained) if differ else np.zeros(len(stored))
    recipe = recipe_of(graph.numerics.fp8)
    assert recipe is not None, "a weight is gathered in 8 bits by a recipe"
    seconds = measure.copies(stored + read, 1)
    if recipe.reads_maxima:
        seconds = seconds + measure.copies(stored, 1)
    return seconds + _of_gradient(measure, graph, name, stored) if trained else seconds


def _of_gradient(measure: Objective, graph: Graph, name: str, stored: Ints) -> Floats:
    """Seconds to cast the gradient of the products to the dtype that it is kept in: (K,)."""
    used, kept = graph.tensor[name].bytes, stored_bytes(graph, name)
    if used == kept:
        return np.zeros(len(stored))
    return measure.copies(stored + stored * used // kept, 1)
