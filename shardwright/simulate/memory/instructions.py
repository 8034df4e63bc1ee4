"""Memory of operators that the memory simulation does not trace with torch.

These are random draws, fused attention, and operators of which it is stated what they keep: joint
operators, shared attention, opaque modules. Temporaries are those that `runtime/random/dropout.py`,
`runtime/sharded_ops/cross_entropy.py` and `runtime/attention` allocate. Sizes are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.ir.graph import ITEM_BYTES, Op, argument
from shardwright.ir.op_memory import contiguous_strides
from shardwright.ir.redistribution import Exchange
from shardwright.program.instructions import (
    Attention,
    Dropout,
    Instruction,
    Joint,
    RunModule,
    Shape,
    SharedAttention,
    Uniform,
)
from shardwright.rules.operators.half_logits import casts_by_rows
from shardwright.simulate.memory.allocator import Block
from shardwright.simulate.memory.collectives import exchange_bytes
from shardwright.simulate.memory.tape import Tape
from shardwright.simulate.memory.values import View
from shardwright.simulate.memory.workspaces import cast_rows_bytes

_BITS = 4  # bytes of a random integer


def draw(tape: Tape, one: Dropout | Uniform) -> None:
    """Simulate dropout or a uniform draw on a tile, and the node of dropout's backward pass."""
    allocator, op = tape.allocator, one.op
    elements = prod(length for dim in one.positions for _, length, _ in dim)
    allocator.briefly(2 * _BITS * elements)  # two integers an element while bits are mixed
    result = op.outputs[0]
    if isinstance(one, Uniform):
        dtype = tape.graph.tensor[result].dtype
        shape = tuple(prod(length for _, length, _ in dim) for dim in one.positions)
        allocator.briefly((_BITS + 16) * elements)  # the bits, and two tensors of float64
        new = allocator.new(elements * ITEM_BYTES[dtype])
        tape.views[result] = View(new, shape, contiguous_strides(shape), dtype)
        return
    x = tape.views[op.operands[0]]
    mask = allocator.new(elements)
    allocator.briefly(2 * x.bytes)  # the scaled tensor, and that times the mask
    made = View(allocator.new(x.bytes), x.shape, contiguous_strides(x.shape), x.dtype, x.grad)
    tape.views[result] = made
    if x.grad and tape.saving:
        allocator.save(mask)

        def back() -> None:
            gradient = tape.taken(result)
            if gradient is not None:
                allocator.briefly(2 * gradient.bytes)
                chosen = allocator.new(gradient.bytes)
                allocator.drop(gradient.block)
                scaled = allocator.new(gradient.bytes)
                allocator.drop(chosen)
                tape.give(op.operands[0], View(scaled, x.shape, made.strides, x.dtype))
            tape.unsave(mask)

        tape.node(tape.label(op), (result,), back)
    allocator.drop(mask)


def attention(tape: Tape, op: Op) -> None:
    """Simulate a fused attention and its backward pass.

    It saves query, key, value, mask, result, and four bytes for each row of the result.
    """
    allocator = tape.allocator
    names = tuple(dict.fromkeys(op.operands))
    query, value = (tape.views[op.operands[i]] for i in (0, 2))
    trained = [name for name in names if tape.views[name].grad]
    shape = (*query.shape[:-1], value.shape[-1])
    size = prod(shape) * ITEM_BYTES[query.dtype]
    result = op.outputs[0]
    masks = []  # a boolean mask is converted to the dtype of the query
    for name in op.operands[3:]:
        mask = tape.views[name]
        if mask.dtype == "bool":
            masks.append(allocator.new(prod(mask.shape) * ITEM_BYTES[query.dtype]))
        else:
            masks.append(allocator.own(mask.block))
    rows = allocator.new(prod(shape[:-1]) * 4)
    made = View(allocator.new(size), shape, _by_heads(shape), query.dtype, bool(trained))
    tape.views[result] = made
    # Workspace: a tile of scores of one thread; the backward pass needs twice as much.
    length, keys = shape[-2], tape.views[op.operands[1]].shape[-2]
    tile = min(keys, 512) * (256 if length >= 768 else 64 if length >= 192 else 32)
    allocator.briefly(4 * tile)
    saved = []
    if trained and tape.saving:
        kept = (*(tape.views[n].block for n in names[:3]), made.block, rows, *masks)
        saved = [allocator.save(block) for block in kept if id(block) not in tape.given_again]
    for block in (rows, *masks):
        allocator.drop(block)
    if not saved:
        return
    forms = {name: tape.views[name] for name in trained}
    grouped = _is_grouped(tape, op)
    groups = query.shape[-3] // tape.views[op.operands[1]].shape[-3]

    def back() -> None:
        came = tape.taken(result)
        given = []
        if came is not None:
            if grouped and tape.rank.backend.device != "cpu":  # of each head of queries
                allocator.briefly(sum(forms[n].bytes for n in names[1:3] if n in forms) * groups)
            for name, view in forms.items():
                block = allocator.new(view.bytes)
                strides = _by_heads(view.shape)
                given.append((name, View(block, view.shape, strides, view.dtype)))
            allocator.briefly(8 * tile)
            allocator.drop(came.block)
        for block in saved:
            tape.unsave(block)
        for name, gradient in given:
            tape.give(name, gradient)

    tape.node(tape.label(op), (result,), back)


def is_fused(tape: Tape, op: Op) -> bool:
    """Whether torch computes this attention by one kernel, which stores no scores.

    Heads of queries that share one of keys take FlashAttention, which has no float32 on GPUs; a
    value of another width than the keys takes the memory-efficient kernel, which only GPUs have.
    """
    if op.kind != "scaled_dot_product_attention":
        return False
    views = [tape.views[name] for name in op.operands]
    query, key, value = views[:3]
    on_cpu = tape.rank.backend.device == "cpu"
    grouped = _is_grouped(tape, op)
    fits = not grouped or (_shares_heads(op) and (on_cpu or ITEM_BYTES[query.dtype] == 2))
    batches = len({view.shape[:-3] for view in (query, key, value)}) == 1
    widths = query.shape[-1] == value.shape[-1] or not (on_cpu or grouped)
    masks = not any(view.grad for view in views[3:])
    return len(query.shape) == 4 and batches and fits and widths and masks


def _is_grouped(tape: Tape, op: Op) -> bool:
    """Whether queries have more heads than keys."""
    query, key = (tape.views[op.operands[i]] for i in (0, 1))
    return query.shape[:-2] != key.shape[:-2]


def _shares_heads(op: Op) -> bool:
    return bool(argument(op, 7, "enable_gqa", False))


def _by_heads(shape: Shape) -> Shape:
    """Strides of [batch, heads, length, width] stored as [batch, length, heads, width]."""
    batch, heads, length, width = contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
    return batch, length, heads, width


def local_shapes(
    tape: Tape, one: Joint | RunModule | Attention | SharedAttention
) -> tuple[Shape, ...]:
    """Shapes of the results on this rank."""
    op = one.op
    if isinstance(one, Joint):
        return one.shapes
    if isinstance(one, RunModule):
        return tuple(tape.graph.tensor[name].shape for name in op.outputs)
    views = [tape.views[name] for name in op.operands]
    return ((*views[0].shape[:-1], views[2].shape[-1]),)


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory that an operator keeps for its backward pass.

    Attributes:
        own: bytes of tensors that it makes and saves.
        operands: names of the operands that it saves.
        backward: bytes of workspace of the backward pass.
    """

    own: int
    operands: tuple[str, ...]
    backward: int


def stated(
    tape: Tape,
    op: Op,
    shapes: tuple[Shape, ...],
    one: Instruction | None = None,
    known: Kept | None = None,
) -> None:
    """Simulate an operator that is not one call of torch, and its backward pass.

    It allocates its results and a workspace as large as they are. It keeps `known`, or what the
    graph states. `shapes` are those of the results on this rank.
    """
    allocator, graph = tape.allocator, tape.graph
    names = tuple(dict.fromkeys(op.operands))
    joint = isinstance(one, Joint)
    inside = _loss_workspace(tape, op) if joint else 0
    if isinstance(one, SharedAttention):
        inside = shared_bytes(tape, one)
    trained = [name for name in names if tape.views[name].grad]
    sizes = [
        prod(shape) * ITEM_BYTES[graph.tensor[name].dtype]
        for name, shape in zip(op.outputs, shapes, strict=True)
    ]
    allocator.briefly(sum(sizes) + inside)
    for name, shape, size in zip(op.outputs, shapes, sizes, strict=True):
        tensor = graph.tensor[name]
        grad = bool(trained) and tensor.requires_grad
        view = View(allocator.new(size), shape, contiguous_strides(shape), tensor.dtype, grad)
        tape.views[name] = view
    if not trained or not tape.saving:
        return
    forms = {name: tape.views[name] for name in trained}
    kept = known or _kept_as_stated(tape, op, sum(sizes), joint=joint)
    saved: list[Block] = []
    for name in dict.fromkeys(kept.operands):
        if id(tape.views[name].block) not in tape.given_again:
            saved.append(allocator.save(tape.views[name].block))
    if kept.own:
        own = allocator.new(kept.own)
        saved.append(allocator.save(own))
        allocator.drop(own)

    def back() -> None:
        came = [tape.taken(name) for name in op.outputs]
        made: list[tuple[str, View]] = []
        if any(gradient is not None for gradient in came):
            allocator.briefly(kept.backward)
            made = [
                (name, View(allocator.new(v.bytes), v.shape, contiguous_strides(v.shape), v.dtype))
                for name, v in forms.items()
            ]
            for gradient in came:
                if gradient is not None:
                    allocator.drop(gradient.block)
        for block in saved:
            tape.unsave(block)
        for name, view in made:
            tape.give(name, view)

    tape.node(tape.label(op), op.outputs, back)


def _kept_as_stated(tape: Tape, op: Op, result_bytes: int, *, joint: bool) -> Kept:
    """The memory that an operator keeps, from what the graph states for the undivided one."""
    if not joint:
        original = tape.serial[op.name]
        by_serial = dict(zip(original.operands, op.operands, strict=True))
        operands = tuple(by_serial.get(name, name) for name in original.saves)
        whole = sum(tape.graph.tensor[name].bytes for name in original.outputs)
        return Kept(-(-original.extra_saved * result_bytes // max(1, whole)), operands, 0)
    if op.kind != "cross_entropy_loss":  # the result, and how many elements are equal to it
        return Kept(2 * result_bytes, op.operands, 0)
    logits = tape.views[op.operands[0]]  # for each sample its normalizer and a flag
    own = 2 * logits.bytes // max(1, logits.shape[min(1, len(logits.shape) - 1)])
    if casts_by_rows(op, logits.dtype):
        return Kept(own, op.operands, cast_rows_bytes(logits.shape) + logits.bytes)
    cast = wide if (wide := _wide_bytes(logits)) > logits.bytes else 0
    return Kept(own, op.operands, cast + logits.bytes if cast else 0)


def _loss_workspace(tape: Tape, op: Op) -> int:
    """Bytes of logits minus their maximum, in float32 at least, where they are not overwritten."""
    logits = tape.views[op.operands[0]]
    if casts_by_rows(op, logits.dtype):
        return cast_rows_bytes(logits.shape)
    wide = _wide_bytes(logits)
    if op.kind != "cross_entropy_loss" or wide == logits.bytes:
        return logits.bytes
    smoothing, target = argument(op, 5, "label_smoothing", 0.0), tape.views[op.operands[1]]
    return 2 * wide if smoothing or target.dtype.startswith(("float", "bfloat")) else wide


def _wide_bytes(logits: View) -> int:
    return prod(logits.shape) * max(4, ITEM_BYTES[logits.dtype])


def shared_bytes(tape: Tape, one: SharedAttention) -> int:
    """Workspace of attention over a split sequence beside operands and result, in bytes.

    In a ring it has a received block of keys and values, the one that is sent, the result in
    float32, and what a kernel finds for one block.
    """
    if not one.keys:
        return 0
    query, key, value = (tape.views[name] for name in one.op.operands[:3])
    wide, block = max(4, ITEM_BYTES[query.dtype]), key.bytes + value.bytes
    return exchange_bytes(Exchange.RING, block, block) + prod(query.shape) * wide + query.bytes
