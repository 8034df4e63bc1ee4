"""Exports one call by `torch.export` and turns its errors into errors that a user can act on."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from shardwright.ir.graph import TensorValue
from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.tracing.call import CaptureError, select_outputs, tensor_of, unflatten
from shardwright.tracing.decompose import decompose
from shardwright.tracing.decompose.buffers import (
    buffer_guard,
    dtypes_and_shapes,
    is_users,
    update_in_place,
    users_frame,
)
from shardwright.tracing.decompose.cached_decompositions import (
    Functional,
    Table,
    decomposed,
    decomposed_at_once,
)
from shardwright.tracing.decompose.control_flow import inline_control_flow, traced_control_flow
from shardwright.tracing.decompose.no_grad_regions import inline_regions
from shardwright.tracing.decompose.sample_selection import gather_selected
from shardwright.tracing.dedup.copies import inline_calls
from shardwright.tracing.dedup.repeats import Repeats
from shardwright.tracing.export.compiler_questions import CompilerQuestions
from shardwright.tracing.export.formulas import Rewritten
from shardwright.tracing.export.precision import cast_input
from shardwright.tracing.export.source_location import FRAME, source_of
from shardwright.tracing.gradients.gradient_guard import GradientGuard
from shardwright.tracing.outputs import OutputTree, split_outputs
from shardwright.tracing.python_state import Snapshot, StateLocation
from shardwright.tracing.values.known_values import KnownValues, ReadInputsError

ASSERTIONS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default")
_UNKNOWN = "an unknown line"
_CALL = re.compile(r"\.forward\(\) (missing|got|takes) ")  # which Python says of a wrong call
_MISSING = re.compile(r"Config' object has no attribute '(\w+_token_id)'")
_RETURNED = (OutputKind.USER_OUTPUT,)
_MOST_ATTEMPTS = 3  # to export with blocks shared


class Returned:
    """Names of a model's outputs, and the Python state that the call changed."""

    keys: tuple[str, ...] = ()
    whole: OutputTree | None = None  # where all of it is kept
    used: frozenset[str] = frozenset()  # inputs with values that counts and decisions depend on
    updated: tuple[str, ...] = ()  # parameters whose new values are the last outputs
    changed: tuple[StateLocation, ...] = ()
    changed_tensors: bool = False  # whether a tensor, parameter or module is among them
    named: frozenset[StateLocation] = frozenset()  # those that only changed from None to a text


class FlatCall(nn.Module):
    """The model as a function of its flat tensor arguments.

    After a call, `returned` has the names of the outputs and the changed state. It is an object of
    its own because export reverts a forward's assignments to its module.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, torch.Tensor],
        constants: Mapping[str, Any],
        numerics: Numerics = EXACT,
        outputs: str = "loss",
    ) -> None:
        super().__init__()
        self.outputs = outputs
        self.model = model
        self.training = model.training  # a new module starts with True
        self.paths = tuple(tensors)
        self.differentiable = frozenset(key for key, t in tensors.items() if t.requires_grad)
        self.order = (*tensors, *constants)
        self.constants = dict(constants)
        self.values: dict[str, torch.Tensor] = {}  # of inputs, for models that read them
        self.follows_values = False
        self._fixed = {
            key: tensor_of(value) if isinstance(value, TensorValue) else value
            for key, value in constants.items()
        }
        self.numerics = numerics
        self.returned = Returned()
        self.repeats: Repeats | None = None
        self.guarded = True  # not in strict mode, which would trace the guard's own bytecode

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.guarded:
            return self._outputs(tensors)
        before = Snapshot(self.model)
        try:
            with GradientGuard(self.model) as guard:
                if self.repeats is None:
                    return self._with_updates(self._outputs(tensors), guard)
                with self.repeats.guard(tensors):
                    found = self._outputs(tensors)
                if guard.updates and guard.updates.values:  # a shared block reads no new values
                    raise CaptureError("a parameter is changed beside blocks that are shared")
                return found
        finally:
            after = Snapshot(self.model)
            self.returned.changed = tuple(before.changes(after))
            self.returned.changed_tensors = before.differs_in_tensors(after)
            self.returned.named = before.became_text(after)
            before.restore()

    def _with_updates(
        self, outputs: tuple[torch.Tensor, ...], guard: GradientGuard
    ) -> tuple[torch.Tensor, ...]:
        """The outputs, and then the new values of parameters that the call changed in place."""
        values = guard.updates.values if guard.updates is not None else {}
        self.returned.updated = tuple(values)
        return (*outputs, *values.values())

    @contextlib.contextmanager
    def shared(self, repeats: Repeats) -> Iterator[None]:
        """A context in which repeated blocks of the model are traced once."""
        self.repeats = repeats
        try:
            yield
        finally:
            self.repeats = None

    def follow_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Follow the `values` of inputs in later calls, and those of tensor constants."""
        self.follows_values = True
        self.values = {key: tensor.detach().cpu().clone() for key, tensor in values.items()}

    def _followed(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, KnownValues]:
        """The model's result, with what is computed from inputs alone known."""
        fixed = {k: v for k, v in self._fixed.items() if isinstance(v, torch.Tensor)}
        first = next(self.model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        known = KnownValues(inputs, self.values, fixed, device)
        args, kwargs = unflatten({**self._fixed, **known.constants, **inputs})
        with known:
            result = self.model(*args, **kwargs)
        if data := known.data & fixed.keys():
            raise CaptureError(
                f"the sizes of {type(self.model).__name__} depend on the values of"
                f" {', '.join(sorted(data))}, which every batch has others of",
                refused=True,
            )
        self.returned.used = frozenset(known.used & inputs.keys())
        return result, known

    def _outputs(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The outputs of the model for these tensors, and its buffers updated in place."""
        given = (cast_input(tensor, self.numerics) for tensor in tensors)
        inputs = dict(zip(self.paths, given, strict=True))
        before = dict(self.model.named_buffers())
        kinds = dtypes_and_shapes(before)
        known: KnownValues | None = None
        if self.follows_values:
            result, known = self._followed(inputs)
        else:
            args, kwargs = unflatten({**self._fixed, **inputs})
            result = self.model(*args, **kwargs)
        self.returned.keys, outputs = select_outputs(result)
        if self.outputs == "model":
            self.returned.whole, outputs = split_outputs(result, outputs)
        update_in_place(self.model, before, kinds)
        return tuple(outputs if known is None else known.with_decisions(outputs))


def export(
    call: FlatCall, tensors: Mapping[str, torch.Tensor], numerics: Numerics = EXACT
) -> tuple[Functional, str]:
    """Export the call on `tensors` as one functional graph of ATen operators; nothing is computed.

    Returns the graph, and a note that is empty unless it was traced in strict mode.

    The model's Python code is traced as it runs first, and where that fails and the code asked
    whether it is compiled, as it runs in a plain call. Then the strict mode, which interprets
    bytecode, is tried.
    """
    first = next(call.model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    # Fresh tensors: two arguments that are one tensor would become one input.
    example = tuple(
        torch.empty_like(t, device=device, requires_grad=t.requires_grad) for t in tensors.values()
    )
    try:
        return _traced(call, example, numerics), ""
    except (CaptureError, ReadInputsError):
        raise
    except Exception as e:
        reason = _explain(call.model, e)
        if call.follows_values:  # which bytecode cannot be interpreted with
            raise _refusal(call, e, reason) from e
        call.guarded, call.returned.changed = False, ()
        try:
            program = _export(call, example, numerics, strict=True)
        except Exception:  # the first error names the user's code
            raise _refusal(call, e, reason) from e
        finally:
            call.guarded = True
        _refuse_numpy_draws(program, type(call.model).__name__)
        if not _is_of_tensors(program):
            raise _refusal(call, e, reason) from e
        outputs = [s for s in program.graph_signature.output_specs if s.kind in _RETURNED]
        if len(outputs) == 1 and not call.returned.keys:  # the first attempt ended before it
            call.returned.keys = ("",)
        return program, f"captured in strict mode, since {reason}"


def _traced(call: FlatCall, example: tuple[torch.Tensor, ...], numerics: Numerics) -> Functional:
    """The call traced as its Python code runs while it is compiled, or else in a plain call."""
    questions = CompilerQuestions(as_called=False)
    try:
        with questions.answered():
            return _export(call, example, numerics, strict=False)
    except (CaptureError, ReadInputsError):
        raise
    except Exception:  # whatever the model raises; it is lost only if its code runs otherwise
        if not questions.asked:
            raise
    with CompilerQuestions(as_called=True).answered():
        return _export(call, example, numerics, strict=False)


def _refusal(call: FlatCall, error: Exception, reason: str) -> CaptureError:
    kind, text = type(error).__name__, str(error).lower()
    by_value = any(word in kind for word in ("DynamicOutputShape", "DataDependent"))
    by_value = by_value or "data-dependent" in text or "unbacked" in text
    return CaptureError(reason, _module_of(call.model, error), by_value=by_value)


def _export(
    call: FlatCall, example: tuple[torch.Tensor, ...], numerics: Numerics, *, strict: bool
) -> Functional:
    """One export of the call, quietly, with repeated blocks shared where that is possible."""
    quiet, said = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.ERROR)  # the error carries the message; no log lines besides
    try:
        with (
            warnings.catch_warnings(),
            traced_control_flow(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            warnings.simplefilter("ignore")
            table = decompose.table(numerics)
            shared = not strict and not call.follows_values
            functional = _with_repeats(call, example, table) if shared else None
            if functional is None:
                said.truncate(said.seek(0))  # the export starts again
                rewritten = nullcontext() if strict else Rewritten()
                with buffer_guard(call.model), rewritten:
                    program = torch.export.export(call, example, strict=strict)
                functional = _functional(program, table, call.returned.updated)
    finally:
        logging.disable(quiet)
    print(said.getvalue(), end="", file=sys.stderr)  # what the model prints
    return functional


def _with_repeats(
    call: FlatCall, example: tuple[torch.Tensor, ...], table: Table
) -> Functional | None:
    """The call exported with repeated blocks traced once; None if that is not possible."""
    inline: frozenset[int] = frozenset()
    for _ in range(_MOST_ATTEMPTS):
        repeats = Repeats(call.model, inline)
        if not repeats.found:
            return None
        try:
            with repeats, call.shared(repeats), buffer_guard(call.model), Rewritten():
                program = torch.export.export(call, example, strict=False)
            if not repeats.failed:
                inline_calls(program, repeats.traced_calls)
                return _functional(program, table)
        except Exception:  # the model's own errors occur again in the export without sharing
            if not repeats.failed:
                return None
        if repeats.differs is None:
            return None
        inline |= {repeats.differs}
    return None


def _functional(
    program: ExportedProgram, table: Table, updated: tuple[str, ...] = ()
) -> Functional:
    inline_control_flow(program, updated)
    inline_regions(program)
    found = decomposed(program, table) or decomposed_at_once(program, table)
    gather_selected(found.graph)
    _drop_checks(found.graph)
    return found


def _drop_checks(graph: fx.Graph) -> None:
    """Remove assertions, and the numbers that are read for them and for nothing else."""
    for node in reversed(graph.nodes):
        values = node.meta.get("val")
        read = isinstance(values, torch.SymInt | torch.SymFloat | torch.SymBool | type(None))
        asserts = str(node.target) in ASSERTIONS
        if node.op == "call_function" and not node.users and (asserts or read):
            graph.erase_node(node)


def _refuse_numpy_draws(program: Functional, name: str) -> None:
    """Raise for numbers of NumPy's generator, for which strict mode has operators of torch.

    Draws of Python's generator do not get here: strict mode cannot trace them.
    """
    for node in program.graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        (maker, _), *_ = node.meta.get("source_fn_stack") or [("", None)]
        if maker.startswith("wrapped_"):  # a function of NumPy
            raise CaptureError(
                f"{source_of(node)}: {name} draws random numbers with numpy.random, which are not"
                " those of one device; draw them with torch.rand, or outside of forward",
                refused=True,
            )


def _is_of_tensors(program: Functional) -> bool:
    """Whether no number is read from a tensor's value, which strict mode keeps as a symbol."""
    values = [n.meta.get("val") for n in program.graph.nodes if n.op == "call_function"]
    kinds = (torch.Tensor, tuple, list, type(None))
    return all(isinstance(value, kinds) for value in values)


def _module_of(model: nn.Module, error: Exception) -> str:
    """The path of the innermost sub-module whose code was running; empty for the model itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = paths.get(id(frame.f_locals.get("self")), found)
    return found


def _packs(error: Exception) -> bool:
    """Whether code that packs sequences, or has packed ones, was running."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        frame.f_code is pack_padded_sequence.__code__
        or any(isinstance(value, PackedSequence) for value in frame.f_locals.values())
        for frame in frames
    )


def _line(frame: traceback.FrameSummary | None, error: Exception) -> str:
    """File and line of `frame`; without one, those that torch names in the message of `error`."""
    if frame is not None:
        return f"{frame.filename}:{frame.lineno}"
    named = [found for found in FRAME.findall(str(error)) if is_users(found[0])]
    return ":".join(named[-1]) if named else _UNKNOWN


def _explain(model: nn.Module, error: Exception) -> str:
    """A one-line message: what failed, at which line of the user's code, what to do."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    where = _line(users_frame(traceback.extract_tb(error.__traceback__)), error)
    kind = type(error).__name__
    if _packs(error):
        return (
            f"{type(model).__name__} cannot be captured: {where}: the sizes of packed sequences"
            " depend on their lengths, which are data; give the recurrent layer the padded batch,"
            " and mask what is beyond each length"
        )
    if "DynamicOutputShape" in kind:
        return (
            f"{type(model).__name__} cannot be captured: {where}: the sizes of what {reason[0]}"
            " gives are not known without computing it; compute it outside the model, from what the"
            " model returns"
        )
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        return (
            f"{type(model).__name__} cannot be captured: {where} decides on the value of a tensor"
            f" ({reason[0]}); express it with torch.where, or take the decision outside the model"
        )
    if _CALL.search(reason[0]) and where == _UNKNOWN:
        return (
            f"the call does not fit {type(model).__name__}: {reason[0]}; give the arguments of its"
            " forward, by position or by name"
        )
    hint = ""
    if missing := _MISSING.search(reason[0]):
        name = missing.group(1)
        hint = f"; give its config {name}, as --set {name}=0 does in commands"
    return f"{type(model).__name__} cannot be captured: {where}: {kind}: {reason[0]}{hint}"
