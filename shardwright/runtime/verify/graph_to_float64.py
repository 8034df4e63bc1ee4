"""Converts a graph to float64, so that errors of a rewrite exceed rounding."""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Arg, Graph, Op, Symbol

_FLOAT64 = {
    "float32": "float64",
    "float16": "float64",
    "bfloat16": "float64",
    "complex64": "complex128",
    "complex32": "complex128",
}


def to_float64(graph: Graph) -> Graph:
    """`graph` with every floating-point value, and every floating-point cast, in float64."""

    def arg(value: Arg) -> Arg:
        if isinstance(value, Symbol) and value.kind == "dtype":
            return Symbol("dtype", _FLOAT64.get(value.name, value.name))
        if isinstance(value, tuple):
            return tuple(arg(v) for v in value)
        return value

    def op(call: Op) -> Op:
        kwargs = tuple((key, arg(value)) for key, value in call.kwargs)
        return replace(call, args=tuple(arg(a) for a in call.args), kwargs=kwargs)

    return replace(
        graph,
        ops=tuple(op(call) for call in graph.ops),
        values=tuple(replace(v, dtype=_FLOAT64.get(v.dtype, v.dtype)) for v in graph.values),
    )
