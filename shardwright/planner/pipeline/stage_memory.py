"""Memory of a pipeline stage by module and purpose.

The sums are those of `StageCosts.bytes`, with each term attributed to its module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Bytes
from shardwright.ir.memory import Memory, Share
from shardwright.planner.pipeline.stage_costs import StageCosts
from shardwright.planner.tables.memory import fixed_bytes, state_parts


def stage_memory(
    costs: StageCosts, waiting: Mapping[int, int], weights: int, transient: int, rank: int
) -> Memory:
    """The memory of one device group of a pipeline.

    Args:
        costs: of one pipeline, whose positions are the ends of its stages.
        waiting: for each stage of the group, the number of micro-batches in flight.
        weights: bytes of predicted weights.
        transient: bytes beside those that add up.
        rank: the first rank of the group.
    """
    writer, running = costs.writer, costs.running
    graph, positions = writer.graph, costs.positions[0].tolist()
    spans = {stage: positions[stage : stage + 2] for stage in waiting}
    found: Counter[tuple[str | None, str]] = Counter()
    kept, copied = np.diff(running.kept[0]).tolist(), np.diff(running.copies[0]).tolist()
    for stage, (begin, end) in spans.items():
        sizes = zip(kept[begin:end], copied[begin:end], strict=True)
        for op, (each, once) in zip(graph.ops[begin:end], sizes, strict=True):
            found[op.source.module, "saved"] += waiting[stage] * int(each) + int(once)
        crossing = costs.crossing[0, stage] + costs.crossing[0, stage + 1]
        found[None, "communication"] += 2 * costs.micro_batches * int(crossing)
    again = dict(costs.cuts.read_again)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        nodes = list(writer.nodes(leaf.name)[0])
        owner, readers = int(running.owners.cost[nodes[0]]), again.get(leaf.name, ())
        copies = sum(
            begin <= owner < end or (begin > owner and any(begin <= i < end for i in readers))
            for begin, end in spans.values()
        )
        size = copies * int(running.states[0, nodes].sum())
        for part, share in state_parts(graph, leaf.name, size, writer.optimizer).items():
            found[leaf.name.rpartition(".")[0], part] += share
    found[None, "parameters"] += weights
    found[None, "batch"] += fixed_bytes(graph)
    found[None, "workspace"] += transient
    shares = [Share(module, part, Bytes(size)) for (module, part), size in found.items()]
    return Memory.of(shares, rank=rank, at="")
