"""Workspace memory inside kernels, stated per operator and measured.

Bytes beside operands, results and gradients, for the CPU kernels of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shardwright.ir.graph import ITEM_BYTES, Op
from shardwright.ir.op_memory import ForwardMemory, Seen
from shardwright.rules.operators.half_logits import casts_by_rows, part_elements
from shardwright.simulate.memory.values import RankModel

_FEW = 4  # channels that oneDNN's convolutions take as they come


class Inside(NamedTuple):
    """Bytes of workspace in the forward and in the backward kernel."""

    forward: int = 0
    backward: int = 0


def inside(op: Op, given: Sequence[Seen], seen: ForwardMemory, rank: RankModel) -> Inside:
    """Workspace of the kernels of `op` on operands `given`, beside what was `seen`."""
    on_cpu = rank.backend.device == "cpu"
    if on_cpu and "conv" in op.kind and len(given) > 1 and given[0].dtype != "float64":
        return _convolution(given[0], given[1], sum(seen.made), rank.channel_block)
    if on_cpu and op.kind == "lstm":
        return _lstm(given)
    if op.kind == "moments":  # the differences
        return Inside(_bytes(given[0]), 0)
    if given and casts_by_rows(op, given[0].dtype):
        cast = cast_rows_bytes(given[0].shape)
        return Inside(cast, cast + _bytes(given[0]))  # backward beside the gradient
    return Inside()


def cast_rows_bytes(logits: Sequence[int]) -> int:
    """Bytes of the float32 copy of some rows of logits (rows, classes) and of what it becomes.

    Both passes of a loss have two such tensors at a time.
    """
    rows, classes = logits
    return 2 * ITEM_BYTES["float32"] * part_elements(rows, classes)


def _convolution(x: Seen, weight: Seen, result: int, block: int) -> Inside:
    """Copies of operands, results and their gradients in blocks of channels."""
    into, out = (
        -(-channels // block) * block / channels for channels in (x.shape[1], weight.shape[0])
    )
    few = x.shape[1] <= _FEW
    blocked, made = int(_bytes(x) * into), int(result * out)
    weights = int(_bytes(weight) * into * out)
    forward = max(_bytes(weight) if few else weights + blocked, made)
    back = made + blocked + weights
    if x.requires_grad:
        back += _bytes(x)
    return Inside(forward, back)


def _lstm(given: Sequence[Seen]) -> Inside:
    """Workspace of oneDNN: reordered weights of a layer, and the gates of all time steps."""
    matrices = [seen for seen in given[3:] if len(seen.shape) == 2]
    layer = max((_bytes(a) + _bytes(b) for a, b in pairwise(matrices)), default=0)
    steps = prod(given[0].shape[:2])
    gates = steps * max((seen.shape[0] for seen in matrices), default=0)
    inside = layer + gates * ITEM_BYTES[given[0].dtype]
    return Inside(inside, inside + layer + _bytes(given[0]))


def _bytes(seen: Seen) -> int:
    return prod(seen.shape) * ITEM_BYTES[seen.dtype]
