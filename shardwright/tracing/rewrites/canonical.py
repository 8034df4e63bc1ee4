"""Removes differences between graphs of one model that was traced on different device types.

A fused attention kernel chooses the strides of its result so that merging the heads needs no copy;
on devices without such a kernel, e.g. the meta device, the trace contains a copy. Traces also
differ in whether a size is written as -1. A plan made on the meta device must fit the model on a
GPU, so both differences are removed. A tensor that is made like another one (`new_zeros`) is made
without it: only its dtype is read, which would need all of it, and the whole batch.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Arg, Graph, Op, Ref, Symbol

_ATTENTION = "scaled_dot_product_attention"
_RESHAPES = ("view", "_unsafe_view", "reshape")  # the lowered program reshapes in any case
_NEW = ("new_zeros", "new_ones", "new_full", "new_empty")
_HERE = Symbol("device", "here")
_VIEWS = (*_RESHAPES, "transpose", "permute", "t", "squeeze", "unsqueeze")


def canonical(graph: Graph) -> Graph:
    """`graph` with explicit sizes in reshapes, and without copies of results of attention."""
    names: dict[str, str] = {}  # removed copy -> its source
    ops: list[Op] = []
    producer: dict[str, Op] = {}
    for op in graph.ops:
        op = _renamed(op, names)
        if op.kind == "clone" and _from_attention(op.operands[0], producer):
            names[op.outputs[0]] = op.operands[0]
            continue
        op = _sized(op, graph.tensor[op.outputs[0]].shape)
        op = _made_alone(op, graph.tensor[op.outputs[0]].dtype)
        producer.update((name, op) for name in op.outputs)
        ops.append(op)
    return replace(
        graph,
        ops=tuple(ops),
        outputs=tuple(names.get(name, name) for name in graph.outputs),
        updates=tuple((buffer, names.get(name, name)) for buffer, name in graph.updates),
        values=tuple(
            replace(value, alias_of=names.get(value.alias_of, value.alias_of))
            for value in graph.values
            if value.name not in names
        ),
    )


def _from_attention(name: str, producer: dict[str, Op]) -> bool:
    """Whether a value is a result of attention, or a view of one."""
    while name in producer and producer[name].kind in _VIEWS:
        name = producer[name].operands[0]
    return name in producer and producer[name].kind == _ATTENTION


def _sized(op: Op, shape: tuple[int, ...]) -> Op:
    if len(op.args) < 2 or not isinstance(op.args[1], tuple):
        return op
    if op.kind in _RESHAPES:
        return replace(op, target="aten.view.default", args=(op.args[0], shape))
    return replace(op, args=(op.args[0], shape, *op.args[2:])) if op.kind == "expand" else op


def _made_alone(op: Op, dtype: str) -> Op:
    """`zeros` for `new_zeros`, and so on."""
    if op.kind not in _NEW:
        return op
    overload = "memory_format" if op.kind == "new_empty" else "default"
    target = f"aten.{op.kind.removeprefix('new_')}.{overload}"
    return replace(
        op,
        target=target,
        args=op.args[1:],
        kwargs=(("dtype", Symbol("dtype", dtype)), ("device", _HERE)),
        saves=(),
    )


def _renamed(op: Op, names: dict[str, str]) -> Op:
    """An operator that reads other values in place of some."""

    def rewrite(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names.get(arg.name, arg.name))
        if isinstance(arg, tuple):
            return tuple(rewrite(a) for a in arg)
        return arg

    return replace(
        op,
        args=tuple(rewrite(a) for a in op.args),
        kwargs=tuple((key, rewrite(value)) for key, value in op.kwargs),
        saves=tuple(dict.fromkeys(names.get(name, name) for name in op.saves)),
    )
