"""Compares gradients of the captured graph with those of the module, if something is suspicious.

Code that traces a model reports with `suspect` what tracing may not capture: an autograd function,
a hook, a detached tensor. Without a report nothing is run. With one, the module and the graph are
run on the example batch if both have values, and are compared by structure otherwise.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright.ir.graph import OPAQUE, Graph, LeafKind, Op, whole_numbers
from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.buffers import users_frame
from shardwright.tracing.export.export import FlatCall
from shardwright.tracing.export.kernels import UNIFORM
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.graph_builder import DROPOUT, Captured

_MOST_ELEMENTS = 2**26  # of all values of a graph; larger ones are compared by structure
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of a gradient's largest element
_COARSE = 5e-2  # of 16-bit floats
_ROUNDING = 1e-2  # of that, of the largest gradient element: for sums that cancel
_DROPOUTS: tuple[Any, ...] = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout,
)  # fmt: skip
_suspicions: ContextVar[list[Suspicion] | None] = ContextVar("suspicions", default=None)


@dataclass(frozen=True)
class Suspicion:
    """Something that tracing may not capture, and its `file:line` in the user's code.

    `structure` says that it is confirmed, where there are no values to compare, by a parameter that
    no gradient reaches in the graph.
    """

    what: str
    where: str
    structure: bool = True

    def __str__(self) -> str:
        return f"{self.what} in {self.where}" if self.where else self.what


@contextmanager
def suspicions() -> Iterator[list[Suspicion]]:
    """A context that collects the reports of `suspect`."""
    found: list[Suspicion] = []
    token = _suspicions.set(found)
    try:
        yield found
    finally:
        _suspicions.reset(token)


def suspect(what: str, where: str = "", *, structure: bool = True) -> None:
    """Report that tracing may not capture `what`; `where` is by default the user's current line.

    Outside of a capture this does nothing.
    """
    found = _suspicions.get()
    if found is None:
        return
    suspicion = Suspicion(what, where or users_line(), structure)
    if suspicion not in found:
        found.append(suspicion)


def users_line() -> str:
    """`file:line` of the innermost frame outside of torch and this package; empty without one."""
    frame = users_frame(traceback.extract_stack())
    return f"{frame.filename}:{frame.lineno}" if frame else ""


def probe(
    call: FlatCall,
    tensors: Mapping[str, torch.Tensor],
    captured: Captured,
    suspected: Sequence[Suspicion],
) -> None:
    """Raise `CaptureError` if gradients of the graph differ from those of the module of `call`.

    Gradients of parameters, and of inputs that require one, are compared. `.grad` is not written,
    and buffers are restored. Dropout is disabled on both sides. Only the structure is checked for
    graphs with other random numbers, with too many elements, in bfloat16 precision or with tensors
    on the meta device, and for modules that cannot be run here.
    """
    if not suspected:
        return
    model = call.model
    if not _has_values(model, tensors, captured):
        _check_structure(captured.graph, suspected)
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = {
        name: t.detach().to(device).requires_grad_(t.requires_grad) for name, t in tensors.items()
    }
    own: dict[str, torch.Tensor] = {k: p for k, p in model.named_parameters() if p.requires_grad}
    own.update((f"the input {name}", t) for name, t in batch.items() if t.requires_grad)
    draws = any(op.target in (DROPOUT, OPAQUE) for op in captured.graph.ops)
    with torch.random.fork_rng(devices=[]), _buffers_put_back(model, call.returned.updated):
        try:
            runs = []
            for _ in range(2 if draws else 1):
                with _buffers_put_back(model, call.returned.updated):
                    runs.append(_Gradients.of(own, lambda: _run_module(call, batch)))
        except Exception:  # this device may lack a kernel: the module does not train here
            runs = []
        theirs = runs[0] if runs else _Gradients()
        if not runs or (
            draws and runs[1].difference_from(theirs)
        ):  # random numbers other than dropout's
            _check_structure(captured.graph, suspected)
            return
        ours = _Gradients.of(own, lambda: _run_graph(model, batch, captured, device))
    if difference := ours.difference_from(theirs):
        raise CaptureError(
            f"{_all(suspected)}: the captured graph gives {difference}; write this as operators"
            " that autograd differentiates, or as torch.library.custom_op with register_autograd"
        )


@final
@dataclass
class _Gradients:
    """Gradients of leaves by name; None for a leaf without one."""

    by_name: dict[str, torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, own: Mapping[str, torch.Tensor], run: Callable[[], Sequence[torch.Tensor]]
    ) -> _Gradients:
        outputs = [out for out in run() if out.requires_grad]
        if not outputs:
            return cls(dict.fromkeys(own))
        # Outputs other than a loss get a different weight for each element.
        weights = [
            torch.linspace(0.5, 1.5, out.numel(), device=out.device).to(out.dtype).view(out.shape)
            for out in outputs
        ]
        found = torch.autograd.grad(outputs, list(own.values()), weights, allow_unused=True)
        dense = (g if g is None or not g.is_sparse else g.to_dense() for g in found)
        return cls(dict(zip(own, dense, strict=True)))

    def difference_from(self, theirs: _Gradients) -> str:
        """The first gradient that differs from the module's, in words; empty if all are equal."""
        largest = theirs.largest()
        for name, gradient in theirs.by_name.items():
            difference = _difference(gradient, self.by_name[name], largest)
            if difference is not None:
                return f"{name} another gradient than the module does ({difference})"
        return ""

    def largest(self) -> float:
        """The absolute value of the largest element that is not NaN."""
        every = (
            g.nan_to_num().abs().max() for g in self.by_name.values() if g is not None and g.numel()
        )
        return max(map(float, every), default=0.0)


def _has_values(model: nn.Module, tensors: Mapping[str, torch.Tensor], captured: Captured) -> bool:
    graph = captured.graph
    every = [*model.parameters(), *model.buffers(), *tensors.values()]
    return (
        not any(t.is_meta for t in every)
        and not any(op.target == UNIFORM for op in graph.ops)
        and not graph.numerics.is_mixed
        and sum(value.num_elements for value in graph.values) <= _MOST_ELEMENTS
    )


@contextmanager
def _buffers_put_back(model: nn.Module, updated: Sequence[str] = ()) -> Iterator[None]:
    """A context that restores buffers, and the values of the `updated` parameters, at its end."""
    names: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    names.update((name, model.get_parameter(name)) for name in updated)
    before = {name: buffer.detach().clone() for name, buffer in names.items()}
    try:
        yield
    finally:
        for path, buffer in names.items():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, buffer)
            if not torch.equal(buffer, before[path]):
                with torch.no_grad():
                    buffer.copy_(before[path])


def _run_module(call: FlatCall, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    guarded, call.guarded = call.guarded, False
    try:
        with _WithoutDropout():
            found: Sequence[torch.Tensor] = call(*batch.values())
            return found
    finally:
        call.guarded = guarded


@final
class _WithoutDropout(TorchFunctionMode):
    """A mode in which dropout is the identity."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]), kwargs
            if len(args) <= 5 and "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _run_graph(
    model: nn.Module, batch: Mapping[str, torch.Tensor], captured: Captured, device: torch.device
) -> list[torch.Tensor]:
    """The outputs of a captured graph for a batch, operator by operator."""
    values: dict[str, torch.Tensor] = {}
    for leaf in captured.graph.leaves:
        if leaf.kind is LeafKind.PARAMETER:
            values[leaf.name] = model.get_parameter(leaf.keys[0])
        elif leaf.kind is LeafKind.BUFFER:
            values[leaf.name] = model.get_buffer(leaf.keys[0]).detach().clone()
        elif leaf.kind is LeafKind.CONSTANT:
            values[leaf.name] = captured.constants[leaf.name].to(device)
        else:
            values[leaf.name] = batch[leaf.keys[0]]
    for op in captured.graph.ops:
        results = _results(op, values, captured, device)
        values.update(zip(op.outputs, results, strict=True))
    return [values[name] for name in captured.graph.outputs]


def _results(
    op: Op, values: Mapping[str, torch.Tensor], captured: Captured, device: torch.device
) -> list[torch.Tensor]:
    if op.target == DROPOUT:
        return [values[op.operands[0]]]
    if op.kind == "view":  # also what the module reshapes
        return [values[op.operands[0]].reshape(whole_numbers(op.args[1]))]
    if op.target == OPAQUE:
        whole: list[torch.Tensor] = captured.opaque[str(op.args[1])](
            [values[name] for name in op.operands]
        )
        return whole
    return call_op(op, values, device)


def _check_structure(graph: Graph, suspected: Sequence[Suspicion]) -> None:
    """Raise `CaptureError` if no gradient reaches a parameter that is read and requires one."""
    suspected = [one for one in suspected if one.structure]
    if not suspected:
        return
    reached = {name for name in graph.outputs if graph.tensor[name].requires_grad}
    read: set[str] = set(graph.outputs)
    for op in reversed(graph.ops):
        if read.intersection(op.outputs):
            read.update(op.operands)
        if reached.intersection(op.outputs):
            reached.update(name for name in op.operands if graph.tensor[name].requires_grad)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        wants = graph.tensor[leaf.name].requires_grad
        if wants and leaf.name in read and leaf.name not in reached:
            raise CaptureError(
                f"{_all(suspected)}: in the captured graph no gradient reaches {leaf.keys[0]},"
                " which requires one; capture the model with weights, so that its gradients can be"
                " compared, or set requires_grad=False for it"
            )


def _difference(
    theirs: torch.Tensor | None, ours: torch.Tensor | None, largest: float
) -> str | None:
    """The difference in words, or None where there is none; a missing gradient counts as zeros."""
    if theirs is None and ours is None:
        return None
    known = theirs if theirs is not None else ours
    assert known is not None
    theirs = torch.zeros_like(known) if theirs is None else theirs
    ours = torch.zeros_like(known) if ours is None else ours
    if theirs.numel() == 0:
        return None
    scale = max(float(theirs.abs().max()), float(ours.abs().max()))
    worst = float((theirs - ours).abs().max())
    if worst != worst:  # NaN on at least one side
        same = torch.equal(theirs.isnan(), ours.isnan())
        return None if same else "one of the two is not a number"
    if worst <= _TOLERANCE.get(known.dtype, _COARSE) * max(scale, _ROUNDING * largest):
        return None
    return f"by {worst:.1e}, where the largest element is {scale:.1e}"


def _all(suspected: Sequence[Suspicion]) -> str:
    first, *more = suspected
    return f"{first}" + (f" and {len(more)} more" if more else "")
