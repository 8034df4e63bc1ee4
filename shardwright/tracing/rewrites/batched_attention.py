"""Replaces calls of attention for equal parts of a sequence by one call over a batch of them.

Towers of images hold the patches of all images in one sequence, and call attention for each image,
or for each window of one, with `split` before and `cat` behind. Pieces of one length are a batch:
one kernel computes them, and devices can share them as they share samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.ir.graph import Arg, Graph, Op, Ref, Tensor

_ATTENTION = "aten.scaled_dot_product_attention.default"
_SPLITS = ("split_with_sizes", "split")


class _Calls(NamedTuple):
    """The calls for all parts, in order, and the sequences of queries, keys and values."""

    calls: Sequence[Op]
    whole: Sequence[str]


def with_batched_attention(graph: Graph) -> Graph:
    """`graph` with one call for equal parts; what it replaces is dead code."""
    ops: list[Op] = []
    values: list[Tensor] = []
    for op in graph.ops:
        found = _parts(op, graph)
        if found is None:
            ops.append(op)
            continue
        for one, made in _batched(op, found, graph):
            ops.append(one)
            values += [made] if made.name not in op.outputs else []
    return replace(graph, ops=tuple(ops), values=(*graph.values, *values)) if values else graph


def _parts(joined: Op, graph: Graph) -> _Calls | None:
    """The calls whose results, each (1, length, heads, width), `cat` joins along the length."""
    if joined.kind != "cat" or joined.args[1:] != (1,) or len(joined.operands) < 2:
        return None
    calls = [_call_of(name, graph) for name in joined.operands]
    first = calls[0]
    if first is None or not _is_plain(first):
        return None
    whole: list[str] = []
    for place in range(3):
        split = graph.producer.get(first.operands[place])
        given = [None if one is None else one.operands[place] for one in calls]
        if split is None or not _is_even(split, graph) or given != [*split.outputs]:
            return None
        whole.append(split.operands[0])
    heads = {graph.tensor[name].shape[:2] for name in whole}
    equal = all(one is not None and _options(one) == _options(first) for one in calls)
    if len(heads) > 1 or not equal:
        return None
    return _Calls([one for one in calls if one is not None], whole)


def _is_plain(call: Op) -> bool:
    """Whether a call has neither a mask nor random numbers."""
    mask, dropout, *_ = (*call.args[3:], None, None)
    others = {*dict(call.kwargs)} <= {"scale", "is_causal"}
    return len(call.operands) == 3 and mask is None and not dropout and others


def _options(call: Op) -> tuple[object, object]:
    return call.args[3:], call.kwargs


def _call_of(name: str, graph: Graph) -> Op | None:
    """The call of attention whose result, with heads behind the length, this value is."""
    turned = graph.producer.get(name)
    if turned is None or turned.kind != "transpose" or {*turned.args[1:]} != {1, 2}:
        return None
    made = graph.producer.get(turned.operands[0])
    while made is not None and made.kind == "view":
        if graph.tensor[made.operands[0]].shape != graph.tensor[made.outputs[0]].shape:
            return None
        made = graph.producer.get(made.operands[0])
    return made if made is not None and made.target == _ATTENTION else None


def _is_even(split: Op, graph: Graph) -> bool:
    """Whether an operator splits the third of four dimensions into equal parts of one sample."""
    shape = graph.tensor[split.operands[0]].shape if split.operands else ()
    lengths = {graph.tensor[name].shape for name in split.outputs}
    along = split.args[2:] or tuple(dim for key, dim in split.kwargs if key == "dim")
    return (
        split.kind in _SPLITS
        and len(shape) == 4
        and shape[0] == 1
        and len(lengths) == 1
        and along in ((2,), (-2,))
    )


def _batched(joined: Op, found: _Calls, graph: Graph) -> Iterator[tuple[Op, Tensor]]:
    """The operators that take the place of `joined`, each with its result."""
    count, call = len(found.calls), found.calls[0]
    given: list[str] = []
    for name in found.whole:
        whole = graph.tensor[name]
        _, heads, length, width = whole.shape
        shape = (heads, count, length // count, width)
        view = replace(whole, name=f"{joined.name}.{name}.parts", shape=shape, alias_of=name)
        turned = (count, heads, *shape[2:])
        batch = replace(view, name=f"{view.name}.first", shape=turned, alias_of=view.name)
        yield _viewed(joined, "aten.view.default", (Ref(name), shape), view)
        yield _viewed(joined, "aten.transpose.int", (Ref(view.name), 0, 1), batch)
        given.append(batch.name)
    made = graph.tensor[call.outputs[0]]
    out = replace(made, name=f"{joined.name}.attention", shape=(count, *made.shape[1:]))
    names = dict(zip((*call.operands, *call.outputs), (*given, out.name), strict=True))
    yield (
        replace(
            call,
            name=out.name,
            args=(*map(Ref, given), *call.args[3:]),
            outputs=(out.name,),
            saves=tuple(names[name] for name in call.saves),
            extra_saved=sum(one.extra_saved for one in found.calls),
        ),
        out,
    )
    _, heads, length, width = out.shape
    turned = (count, length, heads, width)
    rows = replace(out, name=f"{out.name}.rows", shape=turned, alias_of=out.name)
    yield _viewed(joined, "aten.transpose.int", (Ref(out.name), 1, 2), rows)
    result = graph.tensor[joined.outputs[0]]
    yield _viewed(joined, "aten.view.default", (Ref(rows.name), result.shape), result)


def _viewed(joined: Op, target: str, args: tuple[Arg, ...], made: Tensor) -> tuple[Op, Tensor]:
    return Op(made.name, target, args, (), (made.name,), joined.source), made
