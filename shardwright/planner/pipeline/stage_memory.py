"""Memory of a pipeline stage by module and purpose.

The same sums as in `StageCosts.bytes`, but each term with the module that it belongs to.
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
    """The memory of the group that has the stages `waiting`, each with so many micro-batches.

    `costs` are those of one pipeline, whose places are the ends of its stages. Beside what adds up
    there are `weights` bytes of predicted weights and `transient` bytes; `rank` is the group's
    first.
    """
    writer, running = costs.writer, costs.running
    graph, positions = writer.graph, costs.positions[0].tolist()
    spans = {stage: positions[stage : stage + 2] for stage in waiting}
    found: Counter[tuple[str | None, str]] = Counter()
    kept = np.diff(running.kept[0]).tolist()
    for stage, (begin, end) in spans.items():
        for op, size in zip(graph.ops[begin:end], kept[begin:end], strict=True):
            found[op.source.module, "saved"] += waiting[stage] * int(size)
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
