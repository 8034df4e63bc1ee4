"""Capture: the one entry to this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwright.capture.build import Captured, build
from shardwright.capture.call import split_call
from shardwright.capture.export import FlatCall, export
from shardwright.ir.habits import EXACT, Habits


def capture_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    habits: Habits = EXACT,
) -> Captured:
    """The serial dataflow graph of `model(*args, **kwargs)`, its constants and output names.

    The model may live on any device, the meta device too; its mode (train or
    eval) is captured as it is. Raises `CaptureError`, naming the user's line,
    for what no fixed graph can express.
    """
    tensors, constants = split_call(args, kwargs or {})
    call = FlatCall(model, tensors, constants)
    program, how = export(call, tensors, habits)
    return build(program, call, habits, how)
