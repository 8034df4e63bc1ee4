"""Forked processes use the traces that there are, and never torch."""

import pytest

from shardwright.ir.op_memory import Seen, contiguous_strides
from shardwright.planner.processes.known_traces import KnownTraces, NotTracedError
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import residual_layers


def test_only_calls_that_were_traced_have_memory():
    graph, tracer = residual_layers(1), Footprints()
    op = next(one for one in graph.ops if one.kind == "linear")
    names = tuple(dict.fromkeys(op.operands))
    tensors = [graph.tensor[name] for name in names]
    seen = tuple(Seen(one.shape, contiguous_strides(one.shape), one.dtype, True) for one in tensors)
    traced, known = tracer.call(op, names, seen), KnownTraces(tracer).call(op, names, seen)
    gradient = (contiguous_strides(graph.tensor[op.name].shape),)
    for ask in (lambda: known.forward, lambda: known.backward(gradient)):
        with pytest.raises(NotTracedError):
            ask()
    assert traced.forward is not None
    assert known.forward is traced.forward
    with pytest.raises(NotTracedError):
        known.backward(gradient)
    backward = traced.backward(gradient)
    assert known.backward(gradient) is backward
    other = ((1, 1),)
    with pytest.raises(NotTracedError):
        known.backward(other)
