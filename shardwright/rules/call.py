"""One operator call with its shapes, for the functions that build its rule."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.ir.graph import Arg, Graph, Op
from shardwright.rules.notation import Notation, Shape


class Call:
    """One operator call with the shapes of its operands and results."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self.graph = graph
        self.op = op
        self.operands: list[Shape] = [graph.tensor[name].shape for name in op.operands]
        self.results: list[Shape] = [graph.tensor[name].shape for name in op.outputs]

    def arg(self, index: int, name: str, default: Arg = None) -> Arg:
        """Positional argument `index`, or keyword `name`, or the default."""
        if index < len(self.op.args):
            return self.op.args[index]
        return dict(self.op.kwargs).get(name, default)

    def dim(self, index: int, name: str = "dim", default: int = 0) -> int:
        """The argument `dim` as a non-negative dimension of the first operand."""
        value = self.arg(index, name, default)
        assert isinstance(value, int)
        return value % max(1, len(self.operands[0]))

    @property
    def floating(self) -> bool:
        """Whether the first operand and result are floating point, of one dtype."""
        first = self.graph.tensor[self.op.operands[0]]
        out = self.graph.tensor[self.op.outputs[0]]
        return first.dtype == out.dtype and "float" in first.dtype


# Returns the notation of a call, or None if this form of the call has no rule.
Builder = Callable[[Call], Notation | None]
