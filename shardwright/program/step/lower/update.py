"""The optimizer's update at the end of a step, of all parameters at once or in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.options.mixed_precision import stored_item_bytes
from shardwright.program.decisions import UpdateForm
from shardwright.program.instructions import Load
from shardwright.program.step.instructions import Update


def update_of(
    gradients: Iterable[tuple[str, str]],
    kind: Mapping[str, LeafKind],
    graph: Graph,
    tiles: Iterable[Load],
    form: UpdateForm,
) -> tuple[Update, ...]:
    """The update of the parameters that have a gradient; empty if there are none.

    Args:
        gradients: leaves of `graph` and their gradients.
        kind: the kind of each leaf.
        graph: the graph of the step.
        tiles: this rank's tiles of parameters.
        form: its groups, and where the state is.
    """
    found = tuple(one for one in gradients if kind.get(one[0]) is LeafKind.PARAMETER)
    if not found:
        return ()
    if not form.group_bytes:
        return (Update(found, on_host=form.on_host, by_host=form.by_host),)
    shapes = {tile.leaf: tile.shape for tile in tiles}
    sizes = [prod(shapes[leaf]) * stored_item_bytes(graph, leaf) for leaf, _ in found]
    counts = tuple(group_counts(sizes, form.group_bytes))
    groups = counts if len(counts) > 1 else ()
    return (Update(found, groups=groups, on_host=form.on_host),)


def group_counts(sizes: Iterable[int], most: int) -> list[int]:
    """Lengths of runs of `sizes` whose sums are at most `most`; a larger size is a run of its own.

    >>> group_counts([4, 2, 9, 1, 1], 6)
    [2, 1, 2]
    """
    found: list[int] = []
    left = 0
    for size in sizes:
        if not found or size > left:
            found.append(0)
            left = most
        found[-1] += 1
        left -= size
    return found
