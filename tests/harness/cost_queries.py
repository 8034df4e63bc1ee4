"""Cost tables that are asked about single tilings and layouts, in words instead of codes."""

import numpy as np

from shardwright.planner.communication.resharding import Table
from shardwright.planner.tables.layout_codes import encode
from shardwright.planner.tables.model import CostModel
from shardwright.simulate.costs.collectives import priced_steps


def redistribution_seconds(atoms, item_bytes, src, dst, machine):
    """Seconds of the whole way from `src` to `dst`; nothing when they are equal."""
    return sum(seconds for _, _, seconds in priced_steps(atoms, item_bytes, src, dst, machine))


class Asking:
    """Answers with the entries that the model's tables have for what is asked."""

    def __init__(self, *given):
        self.model = CostModel(*given)
        self.graph, self.analysis = self.model.graph, self.model.analysis
        self.fixed_bytes, self.options = self.model.fixed_bytes, self.model.options

    def columns(self, op, tilings):
        rule = self.analysis.rules[op.name]
        return [self.options(op).find(rule, tiling) for tiling in tilings]

    def codes(self, value, layouts):
        return np.array([encode(layout, self.analysis.atoms[value]) for layout in layouts])

    def operator(self, op, tilings):
        table, at = self.model.operator(op), self.columns(op, tilings)
        return Table(table.seconds[at], table.bytes[at])

    def parameter(self, leaf, layouts):
        return self.model.parameter(leaf, self.codes(leaf.name, layouts))

    def edge(self, value, sources, op, positions, tilings, regathered=None, recomputed=False):
        codes = self.codes(value, sources)
        table = self.model.edge(value, codes, op, positions, regathered, recomputed)
        at = self.columns(op, tilings)
        return Table(table.seconds[:, at], table.bytes[:, at])

    def transfers(self, value, source, op, positions, tiling, regathered=False, recomputed=False):
        (code,) = self.codes(value, [source])
        (k,), options = self.columns(op, [tiling]), self.options(op)
        wants = [(int(options.operands[i, k]), int(options.grads[i, k])) for i in positions]
        found = []
        for want in dict.fromkeys(wants):
            found += self.model.transfers(value, int(code), want, op, regathered, recomputed)
        return tuple(found)

    def result(self, op, tiling):
        (k,) = self.columns(op, [tiling])
        return self.model.layout(op.outputs[0], int(self.options(op).results[0, k]))

    def operands(self, op, tiling):
        (k,) = self.columns(op, [tiling])
        codes = self.options(op).operands[:, k].tolist()
        return [self.model.layout(n, code) for n, code in zip(op.operands, codes, strict=True)]

    def transient_bytes(self, tilings):
        """Bytes of the largest workspace among all operators."""
        return max(
            self.model.workspace(op)[self.columns(op, [tilings[op.name]])[0]]
            for op in self.graph.ops
        )
