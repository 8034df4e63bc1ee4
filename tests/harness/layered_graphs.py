"""Graphs of repeated layers, written by hand: capture and torch are not needed to search."""

from dataclasses import replace

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Ref, Source, Tensor, verify

BATCH, WIDTH, INNER = 4096, 1024, 4096  # as large as real layers: costs are not all latency


class Writer:
    """A graph while it is written; every call adds one operator and returns its result's name."""

    def __init__(self):
        self.leaves, self.ops, self.values = [], [], []
        self.shapes = {}

    def leaf(self, name, kind, *shape):
        self.leaves.append(Leaf(name, kind, (name,)))
        self._value(name, shape, kind is LeafKind.PARAMETER)
        return name

    def weight(self, name, *shape):
        return self.leaf(name, LeafKind.PARAMETER, *shape)

    def call(self, name, target, shape, *args, saves=(), **kwargs):
        refs = tuple(Ref(a) if isinstance(a, str) else a for a in args)
        source = Source(name.rpartition(".")[0], "model.py", 1)
        self.ops.append(
            Op(name, f"aten.{target}", refs, tuple(kwargs.items()), (name,), source, tuple(saves))
        )
        self._value(name, shape, True)
        return name

    def linear(self, name, value, rows, width):
        weight = self.weight(f"{name}.weight", width, self.shapes[value][-1])
        return self.call(
            name, "linear.default", (rows, width), value, weight, saves=(value, weight)
        )

    def _value(self, name, shape, grad):
        self.shapes[name] = tuple(shape)
        self.values.append(Tensor(name, tuple(shape), "float32", grad))

    def graph(self, output):
        graph = Graph(tuple(self.leaves), tuple(self.ops), (output,), tuple(self.values))
        verify(graph)
        return graph


def residual_layers(
    count, *, inner=lambda layer: INNER, tied=False, scaled=False, masks=0, learned=False
):
    """`count` layers x + down(tanh(relu(left(x) * right(x)))) between two linear layers; a sum.

    With `scaled` each layer multiplies x by a parameter of its own first; if `tied` by one of all.
    Layers multiply x by one of so many `masks` of it by turns, which are `learned` or not.
    """
    w = Writer()
    x = w.leaf("x", LeafKind.INPUT, BATCH, WIDTH)
    given = [w.linear(f"given{i}", x, BATCH, WIDTH) if learned else x for i in range(masks)]
    by_turns = [
        w.call(
            f"mask{i}", "relu.default", (BATCH, WIDTH), x, saves=(f"mask{i}",) if learned else ()
        )
        for i, x in enumerate(given)
    ]
    x = w.linear("first", x, BATCH, WIDTH)
    shared = w.weight("scale", WIDTH) if tied else None
    for i in range(count):
        at, size = f"layers.{i}", inner(i)
        scale = w.weight(f"{at}.scale", WIDTH) if scaled else shared
        y = x
        if scale is not None:
            saves = (x, scale) if scaled else ()
            y = w.call(f"{at}.scaled", "mul.Tensor", (BATCH, WIDTH), x, scale, saves=saves)
        if by_turns:
            y = w.call(f"{at}.masked", "mul.Tensor", (BATCH, WIDTH), y, by_turns[i % masks])
        left = w.linear(f"{at}.left", y, BATCH, size)
        right = w.linear(f"{at}.right", y, BATCH, size)
        both = w.call(f"{at}.both", "mul.Tensor", (BATCH, size), left, right, saves=(left, right))
        hidden = w.call(
            f"{at}.hidden", "relu.default", (BATCH, size), both, saves=(f"{at}.hidden",)
        )
        soft = w.call(f"{at}.soft", "tanh.default", (BATCH, size), hidden, saves=(f"{at}.soft",))
        down = w.linear(f"{at}.down", soft, BATCH, WIDTH)
        x = w.call(f"{at}.sum", "add.Tensor", (BATCH, WIDTH), x, down)
    last = w.linear("last", x, BATCH, WIDTH)
    return w.graph(w.call("loss", "sum.default", (), last))


def in_sequence_parallelism(plan):
    """The plan in which each rank scales and adds a part of the batch."""
    ops = [
        replace(op, tiling=("d0",) * len(op.tiling)) if op.name.endswith(("scaled", ".sum")) else op
        for op in plan.ops
    ]
    return replace(plan, ops=tuple(ops))
