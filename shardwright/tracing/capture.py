"""The entry point of tracing: `capture_call`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.ir.graph import Constant
from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.tracing.call import EXAMPLE, CaptureError, split_call, value_of
from shardwright.tracing.checkpointing import checkpointing_disabled
from shardwright.tracing.export.export import FlatCall, export
from shardwright.tracing.export.opaque import OpaqueModules
from shardwright.tracing.export.precision import computation_dtype
from shardwright.tracing.export.unvalidated import unvalidated
from shardwright.tracing.gradients.autograd_functions import Functions, calls_runnable
from shardwright.tracing.gradients.gradient_probe import probe, suspicions
from shardwright.tracing.gradients.hooks import refuse_backward_hooks, refuse_hooks
from shardwright.tracing.graph_builder import Captured, build
from shardwright.tracing.model_copies import call_in_trace, call_of_copy, call_on_meta
from shardwright.tracing.state_check import check_state
from shardwright.tracing.values.known_values import ReadInputsError
from shardwright.tracing.values.selection import EXPECTED

_MOST_READ = 2**16  # elements of an input that is a constant of the graph
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
    """The graph of a call; a module that cannot be traced is kept whole, and it starts again."""
    opaque = OpaqueModules(model)
    first: CaptureError | None = None
    found: Captured | None = None
    for _ in range(_MOST_OPAQUE):
        call = FlatCall(model, tensors, constants, numerics, outputs)
        try:
            return _attempt(call, tensors, opaque)
        except CaptureError as e:
            if first is None and e.by_value:
                found = _with_values(call, tensors)
                if found is not None and not _decides(found):
                    return found
            first, path = first or e, _next_opaque(model, e.module, opaque)
            if not path and found is not None:  # it decides by data as for the example batch
                return found
            if not path:
                raise (e if e is first or e.refused else _both_errors(first, e)) from e
            opaque.add(path, str(e))
    assert first is not None
    if found is not None:
        return found
    raise CaptureError(
        f"{first} ({len(opaque.reasons)} sub-modules were kept whole, and that was not enough)"
    )


def _attempt(
    call: FlatCall, tensors: Mapping[str, torch.Tensor], opaque: OpaqueModules, note: str = ""
) -> Captured:
    """The graph of `call`, with the modules that `opaque` keeps whole."""
    model, numerics = call.model, call.numerics
    refuse_backward_hooks(model, opaque.reasons)
    with opaque.replaced(), suspicions() as suspected:
        functions = Functions(model)
        with checkpointing_disabled() as checkpoints, functions.intercepted():
            program, how = export(call, tensors, numerics)
        if how or call.returned.changed:
            trials = [
                call_on_meta(call, tensors),
                call_of_copy(call, tensors),
                call_of_copy(call, tensors, as_given=True),
            ]
            if not call.returned.changed_tensors:  # a trace takes them back
                trials.append(call_in_trace(call, tensors))
            changed, named = call.returned.changed, call.returned.named
            check_state(changed, trials, type(model).__name__, named)
    notes = [text for text in (note, how, opaque.note(), checkpoints.note()) if text]
    calls = {**opaque.calls, **functions.calls}
    if updated := call.returned.updated:
        _require_whole_precision(updated[0], numerics, calls)
    with calls_runnable(calls):
        captured = build(program, call, numerics, "; ".join(notes), calls)
        probe(call, tensors, captured, suspected)
    return captured


def _require_whole_precision(updated: str, numerics: Numerics, calls: Mapping[str, object]) -> None:
    """Raise `CaptureError` where the new value of a parameter would not be exact everywhere."""
    if calls:
        raise CaptureError(
            f"the model changes its parameter {updated} in place while it runs, and has modules"
            " kept whole or autograd functions, which would read the old value; change it after the"
            " step",
            refused=True,
        )
    if numerics.is_mixed:
        raise CaptureError(
            f"the model changes its parameter {updated} in place while it runs, which a copy in"
            f" {numerics.precision} would round; plan with precision='model', or change it after"
            " the step",
            refused=True,
        )


def _with_values(call: FlatCall, tensors: Mapping[str, torch.Tensor]) -> Captured | None:
    """The graph of `call` with values of its inputs followed; None if that does not help.

    Inputs whose values Python code reads become constants of the graph. Raises `CaptureError` if
    such an input holds data that differ from batch to batch.
    """
    values = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
    constants, lines = dict(call.constants), dict[str, str]()
    for _ in range(len(values) + 1):
        rest = {key: tensor for key, tensor in tensors.items() if key not in constants}
        again = FlatCall(call.model, rest, constants, call.numerics, call.outputs)
        again.follow_values({key: values[key] for key in rest if key in values})
        try:
            found = _attempt(again, rest, OpaqueModules(call.model), _values_note(lines))
            return _with_examples(found, {key: values[key] for key in sorted(again.returned.used)})
        except ReadInputsError as e:
            if any(values[name].numel() > _MOST_READ for name in e.names):
                return None
            constants.update((name, value_of(values[name])) for name in e.names)
            lines.update(dict.fromkeys(e.names, e.line))
        except CaptureError as e:
            if e.refused and lines:
                raise
            return None
    return None


def _with_examples(captured: Captured, values: Mapping[str, torch.Tensor]) -> Captured | None:
    """`captured` with the values that its capture followed; None if those are too many.

    A plan captures the model again, without a batch. Numbers are not kept: ones stand for them, and
    if another graph is captured with those, its fingerprint differs from the plan's.
    """
    examples: list[tuple[str, Constant]] = []
    for name, tensor in values.items():
        if not tensor.is_floating_point() and tensor.numel() > _MOST_READ:
            return None
        real = tensor.is_floating_point()
        examples.append((EXAMPLE + name, 1.0 if real else value_of(tensor)))
    graph = captured.graph
    return replace(captured, graph=replace(graph, constants=(*graph.constants, *examples)))


def _decides(captured: Captured) -> bool:
    """Whether a graph has one of several decisions by data, besides checks that raise."""
    return any(op.target == EXPECTED and not op.args[3] for op in captured.graph.ops)


def _values_note(lines: Mapping[str, str]) -> str:
    """A note that names the inputs that are constants of a graph, and the line that reads each."""
    if not lines:
        return "captured with the counts of the example's selections"
    names = ", ".join(f"{name.partition('.')[2]} ({line})" for name, line in lines.items())
    return f"captured with the values of inputs as constants, which the model reads: {names}"


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
