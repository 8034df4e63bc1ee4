"""Random small graphs, and the states of their saved tensors as a mixed-integer program.

The program knows no spaces, no edges and no elimination: it has one binary for each segment that is
recomputed, each operator that runs once there and each input that waits on the host, and derives
bytes from what the operators of the graph save.
"""

from collections import defaultdict

import numpy as np
from scipy.optimize import LinearConstraint, milp

from shardwright.ir.graph import LeafKind
from tests.harness.layered_graphs import Writer

ROWS = 512
GRAIN = 64 * 4 * ROWS  # all values have a multiple of so many bytes


def random_layers(seed):
    """A graph of three to six random layers, with the range of each layer's operators."""
    rng, w = np.random.default_rng(seed), Writer()
    widths = 64 * rng.integers(1, 9, 8)
    width = int(widths[0])
    x = w.linear("first", w.leaf("x", LeafKind.INPUT, ROWS, width), ROWS, width)
    spans = []
    for i in range(int(rng.integers(3, 7))):
        start, at, y = len(w.ops), f"layers.{i}", x
        for j in range(int(rng.integers(1, 5))):
            y = _random_call(w, rng, f"{at}.{j}", y, int(rng.choice(widths)))
        y = w.linear(f"{at}.out", y, ROWS, width)
        x = w.call(f"{at}.sum", "add.Tensor", (ROWS, width), x, y) if rng.random() < 0.8 else y
        spans.append(range(start, len(w.ops)))
    last = w.linear("last", x, ROWS, width)
    return w.graph(w.call("loss", "sum.default", (), last)), spans


def _random_call(w, rng, name, value, width):
    kind = rng.choice(["linear", "relu", "tanh", "mul"])
    shape = w.shapes[value]
    if kind == "linear":
        return w.linear(name, value, ROWS, width)
    if kind == "mul":
        other = w.linear(f"{name}.gate", value, *shape)
        return w.call(name, "mul.Tensor", shape, value, other, saves=(value, other))
    return w.call(name, f"{kind}.default", shape, value, saves=(name,))


class States:
    """The states of the saved tensors of a space on one device, with seconds and bytes."""

    def __init__(self, space):
        self.model, graph = space.model, space.model.graph
        self.graph, self.group = graph, space.recomputed  # operator -> those that run with it again
        self.savers = defaultdict(set)
        for op in graph.ops:
            for name in op.saves:
                if name in graph.producer:
                    self.savers[name].add(op.name)
        seconds = sum(float(self.model.operator(op).seconds[0]) for op in graph.ops)
        parameters = [self.model.parameter(leaf, np.zeros(1, int)) for leaf in space.parameters]
        seconds += sum(float(one.seconds[0]) for one in parameters)
        size = sum(int(one.bytes[0]) for one in parameters)
        size += sum(self.bytes(name) for name in self.savers)
        self.base = seconds, size
        groups = sorted(set(self.group.values()), key=lambda one: min(map(self.place, one)))
        self.columns = []  # seconds, bytes, index of the column that must be chosen, too
        for group in groups:
            self.columns.append((self.twice(group), self.released(group) + self.inputs(group), -1))
        for column, group in enumerate(groups):
            for one in space.kept_operators:
                if one.op.name in group:
                    self.columns.append((-self.twice(one.ops), self.kept(one.op), column))
            if group is not groups[-1] and (cost := self.moved(group)) is not None:
                self.columns.append((*cost, column))

    def place(self, name):
        return next(i for i, op in enumerate(self.graph.ops) if op.name == name)

    def bytes(self, name):
        return self.graph.tensor[name].bytes

    def forward(self, name):
        op = self.graph.op[name]
        return float(self.model.operator(op).seconds[0] - self.model.backward_seconds(op)[0])

    def twice(self, group):
        ops = [self.graph.op[name] for name in group]
        again = [self.model.operator(op, self.group[op.name]).seconds[0] for op in ops]
        once = [self.model.operator(op).seconds[0] for op in ops]
        return float(sum(again) - sum(once))

    def made(self, group):
        return [value for name in group for value in self.graph.op[name].outputs]

    def released(self, group):
        """Bytes of values that only the group saves, as a negative number."""
        return -sum(
            self.bytes(v) for v in self.made(group) if v in self.savers if self.own(v, group)
        )

    def own(self, value, group):
        return self.savers[value] <= group

    def boundaries(self, group):
        """Values from before that the group reads again, which at most one operator saves."""
        read = {
            v for name in group for v in self.graph.op[name].operands if v in self.graph.producer
        }
        return sorted(v for v in read - set(self.made(group)) if len(self.savers[v]) < 2)

    def inputs(self, group):
        """Bytes of these, but for those that are kept anyway."""
        return sum(self.bytes(v) for v in self.boundaries(group) if v not in self.saved_once())

    def saved_once(self):
        return {name for name, savers in self.savers.items() if savers}

    def kept(self, op):
        """Bytes of an operator's result if something runs again or saves it in the group."""
        (value,), group = op.outputs, self.group[op.name]
        again = {one.name for one in self.graph.consumers[value]} & group
        stays = value in self.savers and not self.own(value, group)
        return self.bytes(value) * bool((again or value in self.savers) and not stays)

    def moved(self, group):
        """Seconds and bytes of moving the group's input to the host; None if there is not one."""
        read = {
            v for name in group for v in self.graph.op[name].operands if v in self.graph.producer
        }
        read -= set(self.made(group))
        alone = [
            v
            for v in read
            if not any({r.name for r in self.graph.consumers[v]} & g for g in self.others(group))
        ]
        if len(alone) != 1 or alone[0] not in self.boundaries(group):
            return None
        size, device = self.bytes(alone[0]), self.model.machine.device
        copy, least = size / device.host_bytes_per_s, sum(map(self.forward, group))
        seconds = max(0.0, copy - least) + max(0.0, copy - 2 * least)
        return seconds + 2 * device.launch_seconds, -size

    def others(self, group):
        return [one for one in set(self.group.values()) if one != group]

    def least_seconds(self, limit):
        """The least seconds of a step within `limit` bytes, by HiGHS; infinite if nothing fits."""
        seconds, sizes, needs = (np.array(part) for part in zip(*self.columns, strict=True))
        rows = [sizes / self.base[1]]
        for column, need in enumerate(needs):
            if need >= 0:
                rows.append(np.zeros(len(needs)))
                rows[-1][[column, need]] = 1, -1
        most = np.array([limit / self.base[1] - 1 + 1e-12, *np.zeros(len(rows) - 1)])
        found = milp(
            seconds / self.base[0],
            constraints=LinearConstraint(np.array(rows), -np.inf, most),
            integrality=np.ones(len(needs)),
            bounds=(0, 1),
            options={"mip_rel_gap": 1e-9},
        )
        return np.inf if found.fun is None else self.base[0] * (1 + found.fun)
