"""Detects changes of gradients in a traced call that leave no operator in the graph.

A trace contains values only. This guard intercepts the torch functions that the model calls, to
find hooks on tensors, changes of `requires_grad`, in-place changes that autograd does not record,
and foreign leaves that require a gradient.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.buffers import users_frame
from shardwright.tracing.dedup.module_steps import writes
from shardwright.tracing.gradients.parameter_updates import ParameterUpdates

_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
_VIEWS = frozenset(
    (
        "__getitem__", "as_strided", "chunk", "diagonal", "expand", "expand_as", "flatten",
        "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes",
        "swapdims", "t", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
        "view_as", "tensor_split",
    )
)  # fmt: skip
# Functions whose results may share memory with their first operand.
_SHARING = _VIEWS.union(("to", "type_as", "contiguous", "float", "double", "half", "bfloat16"))
_SHARING = _SHARING.union(("view_as_real", "view_as_complex", "real", "imag", "expand_as"))
_OF_BUFFERS = (
    "__set__",
    "__delete__",
    "batch_norm",
    "instance_norm",
)  # functions that write to no operand
_TRANSFORMS = inspect.getfile(torch.func.vjp)  # the derivatives, and not vmap
_DATA: Any = Tensor.data
_SET_DATA = _DATA.__set__
_REQUIRES_GRAD: Any = Tensor.requires_grad
_TRANSPOSED = (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)


@final
class GradientGuard(TorchFunctionMode):
    """A mode that raises `CaptureError`, with the user's line, for a change of gradients.

    `known` are the tensors that may require gradients; None: all that are traced. With `whole`, the
    path of a module that is kept whole, only effects outside of it are rejected. An error names the
    module to keep whole if that reproduces the gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        known: Mapping[str, Tensor] | None = None,
        inputs: tuple[Tensor, ...] = (),
        whole: str = "",
    ) -> None:
        super().__init__()
        self._paths = {id(module): path for path, module in model.named_modules()}
        own = dict(model.named_parameters()) if known is None else known
        self._parameters = {id(t): name for name, t in own.items()}
        self._outside: set[int] | None = None
        if known is not None:
            self._outside = {id(t) for t in (*known.values(), *inputs)}
        self._whole = whole
        # Writes to parameters of the model; None where a part of it is kept whole.
        self.updates = ParameterUpdates(model) if known is None else None
        self._detached: dict[int, Tensor] = {}  # aliases that autograd does not know, by identity
        self._plain: dict[int, Tensor] = {}  # made in the call without a trace, by identity
        self._made: list[Tensor] = []  # kept, so that no other gets the same identity

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        updates, given = self.updates, args
        if updates is not None and updates.values:
            self._refuse_stale(updates, (*args, *kwargs.values()))
            given, kwargs = updates.current(args), updates.current(dict(kwargs))
        if name == "__get__":
            return self._read(func, args, given)
        if func is torch.autograd.grad or func is Tensor.backward:
            grad = func is torch.autograd.grad
            self._refuse_derivative("torch.autograd.grad" if grad else "backward()")
        if func is F.embedding or func is F.embedding_bag:
            self._refuse_renorm(func, args, kwargs)
        first = args[0] if args else None
        if updates is not None and (of := self._written(name, first, kwargs)):
            assert isinstance(first, Tensor)
            return updates.write(of, func, first, *given[1:], **kwargs)
        if updates is not None and func == _SET_DATA and self._assigned(updates, args, given):
            return None
        if isinstance(first, Tensor):
            self._check(func, name, first, args, kwargs)
        for value in args:
            self._refuse_outsiders(value)
        for value in kwargs.values():
            self._refuse_outsiders(value)
        if updates is not None and updates.values and writes(name, kwargs):
            self._refuse_view(updates, first)
        result = func(*given, **kwargs)
        if updates is not None and isinstance(first, Tensor) and name in _SHARING:
            updates.note_views(first, result)
        if name == "detach" and isinstance(first, Tensor):
            self._note_alias(first, result)
        elif name in _VIEWS and id(first) in self._detached:
            self._detached.update((id(t), t) for t in _tensors(result))
        if type(result) is Tensor and self._outside is None:
            self._plain[id(result)] = result
        if self._outside is not None and isinstance(result, Tensor):
            if result.requires_grad and result.is_leaf:
                self._outside.add(id(result))
            self._made.append(result)
        return result

    def _written(self, name: str, first: Any, kwargs: Mapping[str, Any]) -> str:
        """The parameter that a function writes, and autograd does not see; empty if it is none."""
        of = self._parameters.get(id(first), "")
        if (
            not of
            or not writes(name, kwargs)
            or name in _OF_BUFFERS
            or kwargs.get("out") is not None
        ):
            return ""
        unseen = not torch.is_grad_enabled() or not first.requires_grad
        # A change of `requires_grad`, or of what autograd knows, has an error of its own.
        return of if unseen and name not in ("requires_grad_", "detach_", "__set__") else ""

    def _assigned(
        self, updates: ParameterUpdates, args: tuple[Any, ...], given: tuple[Any, ...]
    ) -> bool:
        """Write what is assigned to `.data` of a parameter, if of the same shape and dtype."""
        parameter, value = args[0], args[1]
        of = self._parameters.get(id(parameter), "")
        same = isinstance(value, Tensor) and value.shape == parameter.shape
        if not of or not same or value.dtype != parameter.dtype:
            return False
        if value is not parameter:  # `Module.to` assigns a parameter to itself
            updates.write(of, Tensor.copy_, parameter, given[1])
            self._detached[id(value)] = value  # they share memory from now on
        return True

    def _refuse_stale(self, updates: ParameterUpdates, given: tuple[Any, ...]) -> None:
        if name := updates.stale(given):
            raise self._error(
                f"the model reads a view of its parameter {name} that was made before the parameter"
                " was changed in place; make the view after the change"
            )

    def _refuse_view(self, updates: ParameterUpdates, target: Any) -> None:
        """Raise for a write to a part of a parameter that was written to as a whole before."""
        if name := updates.viewed(target):
            raise self._error(
                f"the model changes a view of its parameter {name}, or several parameters at once,"
                " in place; change the parameter itself, by p[index] = value or p.copy_(value)"
            )

    def _read(self, func: Any, args: tuple[Any, ...], given: tuple[Any, ...]) -> Any:
        of, tensor = getattr(func, "__self__", None), args[0]
        if of is _DATA:  # export loses the relation between `.data` and its tensor
            alias = given[0].detach()
            self._note_alias(tensor, alias)
            return alias
        result = func(*(given if of in _TRANSPOSED else args))
        if of in _TRANSPOSED and id(tensor) in self._detached:
            self._detached[id(result)] = result
        if of in _TRANSPOSED and self.updates is not None:
            self.updates.note_views(tensor, result)
        return result

    def _note_alias(self, tensor: Tensor, alias: Tensor) -> None:
        """Record that `alias` shares memory with a tensor without autograd's knowledge."""
        of = self._parameters.get(id(tensor))
        if of is not None:
            self._parameters[id(alias)] = of
            if self.updates is not None:
                self.updates.note_alias(alias, of)
        if of is not None or tensor.requires_grad or id(tensor) in self._detached:
            self._detached[id(alias)] = alias

    def _check(
        self, func: Any, name: str, first: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise for a function of torch that changes gradients outside of the graph."""
        of = self._parameters.get(id(first), "")
        if name in _HOOKS:
            if not self._whole or of:
                raise self._error(
                    f"the model registers a hook on {of or 'a tensor'} ({name}), which changes"
                    " gradients and is no part of a graph; express it as operators, or register it"
                    " in a module inside, which is then kept whole",
                    keep=not of,
                )
        elif name == "requires_grad_" or (
            name == "__set__" and getattr(func, "__self__", None) is _REQUIRES_GRAD
        ):
            wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
            if of and bool(wanted) is not first.requires_grad:
                raise self._error(
                    f"the model sets requires_grad of its parameter {of} to {bool(wanted)} while it"
                    " runs; set it before the call, use detach(), or make a model of each phase"
                )
            if self._outside is not None:
                self._outside.add(id(first))
        elif name == "__set__" and getattr(func, "__self__", None) is _DATA:
            if (self._whole and not of) or args[1] is first:  # as `Module.to` does
                return
            raise self._error(
                f"the model sets .data of {of or 'a tensor'}, which autograd does not see;"
                + (" change it after the step" if of else " use a new tensor"),
                keep=not of,
            )
        elif name == "detach_":
            if not self._whole:
                raise self._error(
                    "the model calls detach_(), which cuts a tensor off that was recorded; use"
                    " x = x.detach()",
                    keep=True,
                )
        elif writes(name, kwargs) and name not in _OF_BUFFERS:
            self._refuse_unrecorded(first, kwargs.get("out"))

    def _refuse_derivative(self, name: str) -> None:
        """Raise for a backward pass inside of the forward pass."""
        raise self._error(
            f"the model calls {name} while it runs, and a graph has no operator for that; take the"
            " derivative outside, of what the parallel module returns, with create_graph=True"
        )

    def _refuse_renorm(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise for a lookup with `max_norm` in a weight that requires a gradient."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        weight = given["weight"]
        if given.get("max_norm") is None or not weight.requires_grad:
            return
        of = self._parameters.get(id(weight), "")
        if self._whole and not of:
            return
        raise self._error(
            f"an embedding with max_norm shrinks rows of {of or 'its weight'} in place, and"
            " autograd does not record it; shrink them after the step, or look up in a weight that"
            " operators have normalised",
            keep=not of,
        )

    def _refuse_unrecorded(self, *targets: Any) -> None:
        """Raise for an unrecorded in-place change of a tensor that requires a gradient."""
        for tensor in _tensors(targets):
            if self._outside is None and type(tensor) is Tensor and id(tensor) not in self._plain:
                raise self._error(
                    f"the model changes a tensor of shape {tuple(tensor.shape)} in place that is no"
                    " buffer; register it with register_buffer"
                )
            of = self._parameters.get(id(tensor), "")
            if self._whole and not of:
                continue
            if of and (id(tensor) in self._detached or not torch.is_grad_enabled()):
                raise self._error(
                    f"the model changes its parameter {of} in place while it runs, which is no"
                    " buffer; change it after the step, or work on a copy (x = x.clone())"
                )
            unrecorded = not torch.is_grad_enabled() and tensor.requires_grad
            if id(tensor) in self._detached or unrecorded:
                raise self._error(
                    "the model changes a tensor in place that shares memory with one that wants a"
                    " gradient, and autograd does not record it (.data, detach or no_grad); work"
                    " on a copy (x = x.clone())",
                    keep=True,
                )

    def _refuse_outsiders(self, value: Any) -> None:
        """Raise for a tensor that requires a gradient and is neither the model's nor made here."""
        if isinstance(value, Tensor):
            if self._outside is None:
                outside = type(value) in (Tensor, nn.Parameter) and value.requires_grad
            else:
                outside = value.requires_grad and value.is_leaf and id(value) not in self._outside
            if outside:
                if any(f.filename == _TRANSFORMS for f in traceback.extract_stack()):
                    self._refuse_derivative("a transform of torch.func")
                raise self._error(
                    f"the model reads a tensor of shape {tuple(value.shape)} that wants a gradient"
                    " and is not registered on it, so no plan would train it; register it as an"
                    " nn.Parameter, read a parameter from its module, or detach() it in __init__"
                )
        elif isinstance(value, tuple | list):
            for part in value:
                self._refuse_outsiders(part)

    def _error(self, message: str, *, keep: bool = False) -> CaptureError:
        frame = users_frame(traceback.extract_stack())
        at = f"{frame.filename}:{frame.lineno}" if frame else "an unknown line"
        return CaptureError(f"{at}: {message}", self._module() if keep else "", refused=not keep)

    def _module(self) -> str:
        """The path of the innermost module whose code is running."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            owner: Any = frame.f_locals.get("self")
            path: str | None = self._paths.get(id(owner))
            if path is not None:
                return path
            frame = frame.f_back
        return ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
