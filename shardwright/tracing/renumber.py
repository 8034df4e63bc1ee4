"""Renames values so that their names depend only on the computation.

Export numbers operators while it traces, dead ones included, and its traces differ slightly between
device types. After renumbering, in order and by kind, equal computations have equal names, so a
plan made on the meta device fits the model on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardwright.ir.graph import Arg, Graph, LeafKind, Op, Ref


def renumbered(graph: Graph) -> tuple[Graph, dict[str, str]]:
    """`graph` with operators and constants renamed, and the new name of every value."""
    taken = {leaf.name for leaf in graph.leaves if leaf.kind is not LeafKind.CONSTANT}
    counts: Counter[str] = Counter()

    def fresh(stem: str) -> str:
        while True:
            number = counts[stem]
            counts[stem] += 1
            name = f"{stem}_{number}" if number else stem
            if name not in taken:
                taken.add(name)
                return name

    names = {leaf.name: leaf.name for leaf in graph.leaves}
    for leaf in graph.leaves_of(LeafKind.CONSTANT):
        names[leaf.name] = fresh("constant")
    ops = []
    calls: dict[str, str] = {}  # the group that operators are parts of
    for op in graph.ops:
        if op.part_of and op.part_of not in calls:
            calls[op.part_of] = f"{op.part_of.rpartition('_')[0]}_{len(calls)}"
        name = fresh(op.kind.strip("_") or op.kind)
        single = len(op.outputs) == 1 and op.outputs[0] == op.name
        outputs = (name,) if single else tuple(f"{name}.{i}" for i in range(len(op.outputs)))
        names.update(zip(op.outputs, outputs, strict=True))
        part_of = calls.get(op.part_of, "")
        ops.append(replace(_renamed(op, name, outputs, names), part_of=part_of))
    leaves = tuple(
        replace(leaf, name=names[leaf.name], keys=(names[leaf.name],))
        if leaf.kind is LeafKind.CONSTANT
        else leaf
        for leaf in graph.leaves
    )
    values = tuple(
        replace(v, name=names[v.name], alias_of=names[v.alias_of] if v.alias_of else "")
        for v in graph.values
    )
    renamed = replace(
        graph,
        leaves=leaves,
        ops=tuple(ops),
        values=values,
        outputs=tuple(names[name] for name in graph.outputs),
        updates=tuple((buffer, names[value]) for buffer, value in graph.updates),
    )
    return renamed, names


def _renamed(op: Op, name: str, outputs: tuple[str, ...], names: Mapping[str, str]) -> Op:
    """An operator under another name, with renamed values."""

    def rewrite(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(names[arg.name])
        if isinstance(arg, tuple):
            return tuple(rewrite(a) for a in arg)
        return arg

    return replace(
        op,
        name=name,
        args=tuple(rewrite(a) for a in op.args),
        kwargs=tuple((key, rewrite(value)) for key, value in op.kwargs),
        outputs=outputs,
        saves=tuple(names[saved] for saved in op.saves),
    )
