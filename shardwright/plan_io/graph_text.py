"""Graphs as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from shardwright.ir.graph import Arg, Graph, Leaf, LeafKind, Op, Ref, Source, Symbol, Tensor
from shardwright.ir.options.numerics import Numerics
from shardwright.plan_io.checks import constant, packed_constant


def graph_to_json(graph: Graph) -> str:
    """One JSON text; `graph_from_json` reads it back to an equal graph."""
    return json.dumps(
        {
            "leaves": [[leaf.name, leaf.kind.value, list(leaf.keys)] for leaf in graph.leaves],
            "values": [
                [v.name, list(v.shape), v.dtype, v.requires_grad, v.alias_of]
                + ([v.gathered_as] if v.gathered_as else [])
                for v in graph.values
            ],
            "ops": [
                {
                    "name": op.name,
                    "target": op.target,
                    "args": [_pack(a) for a in op.args],
                    "kwargs": [[k, _pack(v)] for k, v in op.kwargs],
                    "outputs": list(op.outputs),
                    "source": [op.source.module, op.source.file, op.source.line],
                    "saves": list(op.saves),
                    "extra_saved": op.extra_saved,
                    **({"extra_rows": op.extra_rows} if op.extra_rows else {}),
                    "rule": op.rule,
                    "part_of": op.part_of,
                    "flop": op.flop,
                }
                for op in graph.ops
            ],
            "outputs": list(graph.outputs),
            "updates": [list(pair) for pair in graph.updates],
            "constants": [[key, packed_constant(value)] for key, value in graph.constants],
            "note": graph.note,
            "numerics": asdict(graph.numerics),
        }
    )


def graph_from_json(text: str) -> Graph:
    """The graph that `graph_to_json` wrote."""
    data = json.loads(text)
    return Graph(
        leaves=tuple(Leaf(n, LeafKind(k), tuple(keys)) for n, k, keys in data["leaves"]),
        ops=tuple(
            Op(
                name=op["name"],
                target=op["target"],
                args=tuple(_unpack(a) for a in op["args"]),
                kwargs=tuple((k, _unpack(v)) for k, v in op["kwargs"]),
                outputs=tuple(op["outputs"]),
                source=Source(*op["source"]),
                saves=tuple(op["saves"]),
                extra_saved=op["extra_saved"],
                extra_rows=op.get("extra_rows", 0),
                rule=op["rule"],
                part_of=op["part_of"],
                flop=op["flop"],
            )
            for op in data["ops"]
        ),
        outputs=tuple(data["outputs"]),
        values=tuple(Tensor(n, tuple(s), *rest) for n, s, *rest in data["values"]),
        updates=tuple((a, b) for a, b in data["updates"]),
        constants=tuple((key, constant(value)) for key, value in data["constants"]),
        note=data["note"],
        numerics=Numerics(**data["numerics"]),
    )


def _pack(arg: Arg) -> Any:
    """JSON for one argument: references and symbols as objects, special floats as text objects."""
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, Symbol):
        return {arg.kind: arg.name}
    if isinstance(arg, tuple):
        return [_pack(a) for a in arg]
    if isinstance(arg, float):
        return {"float": arg.hex() if arg == arg and abs(arg) != float("inf") else str(arg)}
    return arg


def _unpack(data: Any) -> Arg:
    if isinstance(data, list):
        return tuple(_unpack(a) for a in data)
    if isinstance(data, dict):
        ((kind, name),) = data.items()
        if kind == "ref":
            return Ref(name)
        if kind == "float":
            return float.fromhex(name)
        return Symbol(kind, name)
    assert data is None or isinstance(data, bool | int | str)
    return data
