"""Memory of a mixture of experts on a device that holds some of the experts.

The number of received rows depends on the data; it is taken to be that of the busiest device under
the assumed skew. The simulation models `runtime/sharded_ops/experts.py`.
"""

from __future__ import annotations

from math import ceil, prod

import numpy as np

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.op_memory import Seen
from shardwright.ir.redistribution import Exchange
from shardwright.machine.expert_loads import busiest_share
from shardwright.program.instructions import Compute
from shardwright.simulate.costs.expert_visits import visited_share
from shardwright.simulate.memory.collectives import exchange_bytes
from shardwright.simulate.memory.instructions import Kept, stated
from shardwright.simulate.memory.tape import Tape

_OF_TOKENS = 3  # operands: tokens, their experts and scores; others are of experts


def local_experts(tape: Tape, one: Compute) -> None:
    """Simulate the operator on this device's rows, with the buffers of rows in flight."""
    op, routing = one.op, one.routing
    assert routing is not None, "a mixture of which all is here is an operator like others"
    names = tuple(dict.fromkeys(op.operands))
    views = [tape.views[name] for name in names]
    tokens = views[0].shape[0]
    devices = prod(tape.sizes[axis] for axis in routing.axes)
    offered = tokens * devices
    owned = np.array(routing.length / len(routing.split))
    here = ceil(offered * float(busiest_share(tape.skew, owned)))
    given = tuple(
        _rows(v.shape, here)._replace(dtype=v.dtype, requires_grad=v.grad and tape.saving)
        if name in op.operands[:_OF_TOKENS]
        else Seen(v.shape, v.strides, v.dtype, v.grad and tape.saving)
        for name, v in zip(names, views, strict=True)
    )
    seen = tape.book.call(op, names, given).forward
    if seen is None:
        stated(tape, op, one.shapes, one)
        return
    made = [size for n, size in enumerate(seen.made, len(names)) if n in seen.saved]
    row = ITEM_BYTES[views[0].dtype] * views[0].shape[1]
    each = tape.views[op.operands[1]].shape[1]
    moving = 0
    if routing.hops:
        share = visited_share(len(routing.split), each, np.array([float(devices)]))[0]
        row = ceil(row * each * share)
        moving = exchange_bytes(Exchange.ROWS, tokens * row, here * row)
    tape.allocator.briefly(max(seen.peak, sum(made) + moving))
    operands = tuple(name for n, name in enumerate(names) if n in seen.saved)
    stated(tape, op, one.shapes, one, Kept(sum(made), operands, seen.peak))


def _rows(shape: tuple[int, ...], rows: int) -> Seen:
    width = shape[1]
    return Seen((rows, width), (width, 1), "", False)
