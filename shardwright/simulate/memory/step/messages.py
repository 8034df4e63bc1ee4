"""Memory of messages between pipeline stages, as `runtime/executor/messages.py` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwright.ir.op_memory import contiguous_strides
from shardwright.program.step.instructions import Recv, Send
from shardwright.program.step.message_buffer import buffer_layout
from shardwright.simulate.memory.allocator import Allocator, Use
from shardwright.simulate.memory.values import View


def sending(
    allocator: Allocator, one: Send, values: Mapping[str, View]
) -> Callable[[], list[View]]:
    """Start to send: one value from its own memory, several from a buffer with copies."""
    view = values.get(one.payload[0].value) if len(one.payload) == 1 else None
    if view is not None and view.contiguous:
        buffer = allocator.own(view.block)
    else:
        buffer = allocator.new(buffer_layout(one.payload).bytes, Use.COMMUNICATION)

    def sent() -> list[View]:
        allocator.drop(buffer)
        return []

    return sent


def receiving(allocator: Allocator, one: Recv) -> Callable[[], list[View]]:
    """Start to receive into one buffer, which the values share."""
    buffer = allocator.new(buffer_layout(one.payload).bytes, Use.COMMUNICATION)

    def results() -> list[View]:
        allocator.becomes(buffer, Use.WORKSPACE)
        found = [
            View(allocator.own(buffer), p.shape, contiguous_strides(p.shape), p.dtype, grad=True)
            for p in one.payload
        ]
        allocator.drop(buffer)
        return found

    return results
