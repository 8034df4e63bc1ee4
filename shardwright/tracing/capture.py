"""The entry point of tracing: `capture_call`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.tracing.call import CaptureError, split_call
from shardwright.tracing.checkpointing import checkpointing_disabled
from shardwright.tracing.export.export import FlatCall, export
from shardwright.tracing.export.opaque import OpaqueModules
from shardwright.tracing.export.precision import computation_dtype
from shardwright.tracing.export.unvalidated import unvalidated
from shardwright.tracing.gradients.autograd_functions import Functions, calls_runnable
from shardwright.tracing.gradients.gradient_probe import probe, suspicions
from shardwright.tracing.gradients.hooks import refuse_backward_hooks, refuse_hooks
from shardwright.tracing.graph_builder import Captured, build
from shardwright.tracing.model_copies import call_of_copy, call_on_meta
from shardwright.tracing.state_check import check_state

_MOST_OPAQUE = 16  # a model with more opaque modules is refused, because hardly any of it is traced


def capture_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    numerics: Numerics = EXACT,
    outputs: str = "loss",
) -> Captured:
    """The serial dataflow graph of `model(*args, **kwargs)`, its constants and output names.

    The model may be on any device, including the meta device, and is captured in its current mode
    (train or eval). A sub-module that export cannot trace becomes one opaque operator. Gradients
    are recorded even if the caller disabled them. With `outputs="model"` the graph returns all
    tensors that the model returns, otherwise only the loss if there is one. Raises `CaptureError`,
    with the user's line, for code that no static graph can express.
    """
    tensors, constants = split_call(args, kwargs or {})
    refuse_hooks(model)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        computation_dtype(model, numerics),
        unvalidated(),
    ):
        return _captured(model, tensors, constants, numerics, outputs)


def _captured(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    numerics: Numerics,
    outputs: str,
) -> Captured:
    opaque = OpaqueModules(model)
    first: CaptureError | None = None
    for _ in range(_MOST_OPAQUE):
        call = FlatCall(model, tensors, constants, numerics, outputs)
        try:
            refuse_backward_hooks(model, opaque.reasons)
            with opaque.replaced(), suspicions() as suspected:
                functions = Functions(model)
                with checkpointing_disabled() as checkpoints, functions.intercepted():
                    program, how = export(call, tensors, numerics)
                if how or call.returned.changed:
                    trials = (call_on_meta(call, tensors), call_of_copy(call, tensors))
                    changed, named = call.returned.changed, call.returned.named
                    check_state(changed, trials, type(model).__name__, named)
            notes = [text for text in (how, opaque.note(), checkpoints.note()) if text]
            calls = {**opaque.calls, **functions.calls}
            with calls_runnable(calls):
                captured = build(program, call, numerics, "; ".join(notes), calls)
                probe(call, tensors, captured, suspected)
            return captured
        except CaptureError as e:
            first, path = first or e, _next_opaque(model, e.module, opaque)
            if not path:
                raise (e if e is first or e.refused else _both_errors(first, e)) from e
            opaque.add(path, str(e))
    assert first is not None
    raise CaptureError(
        f"{first} ({len(opaque.reasons)} sub-modules were kept whole, and that was not enough)"
    )


def _both_errors(first: CaptureError, last: CaptureError) -> CaptureError:
    if str(first) == str(last):
        return first
    return CaptureError(f"{first} (with modules kept whole it fails too: {last})")


def _next_opaque(model: nn.Module, path: str, opaque: OpaqueModules) -> str:
    """The module to make opaque after an error in the one at `path`; empty if it is the model."""
    known = dict(model.named_modules())
    while path and (
        path not in known
        or path in opaque.reasons
        or isinstance(known[path], nn.ModuleList | nn.ModuleDict)  # which are never called
    ):
        path = path.rpartition(".")[0]
    return path
