"""Captures calls of `torch.autograd.Function`, each as one operator with its own backward.

A trace contains the operators of such a function's forward, and autograd would differentiate those.
While a model is traced, its calls are intercepted and become `shardwright.function`: its operands
are the tensors that the function is given, its results those that it returns. The operator runs the
function's own `apply`.

The results are found by running the function, forward and backward, on the meta device, or on
random numbers if its code reads values. Calls are intercepted in the next class of `Function`'s
method resolution order, to which `Function.apply` passes them on, because code often binds `apply`
early (`ste = STE.apply`). torch has no public name for that class.
"""

from __future__ import annotations

import contextvars
import enum
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shardwright.ir.graph import FUNCTION, Op
from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.buffers import users_frame
from shardwright.tracing.export.operators import python_operator
from shardwright.tracing.export.patches import Patches
from shardwright.tracing.gradients.autograd_function_run import (
    FunctionTensor,
    UnfitError,
    probe_function,
)
from shardwright.tracing.gradients.gradient_probe import suspect
from shardwright.tracing.trees import Slot, join_tensors, split_tensors

_BASE: Any = torch.autograd.Function.__mro__[1]
# Functions of torch that wrap operators or modules, which are traced through.
_TRANSPARENT = ("torch._library", "torch._higher_order_ops", "torch._dynamo", "torch._functorch")
_HOOKS = ("torch.nn.modules._functions", "BackwardHookFunction")
_TRANSFORMED = "torch._functorch.autograd_function"
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type(...), slice, torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format, type,
)  # fmt: skip


@torch.library.custom_op("shardwright::function", mutates_args=())
def function(tensors: Sequence[Tensor], key: str, kind: str) -> list[Tensor]:
    """A placeholder in exported programs."""
    raise AssertionError(f"{key} is run by its call")


@function.register_fake
def _(tensors: Sequence[Tensor], key: str, kind: str) -> list[Tensor]:
    now = _now.get()
    assert now is not None
    return [
        tensors[0].new_empty_strided(k.shape, k.stride, dtype=k.dtype)
        for k in now.calls[key].results
    ]


@dataclass
class FunctionCall:
    """One form of call of an autograd function: `arguments` and `returned` hold slots for tensors.

    `kind` identifies its class and its arguments other than tensors, `where` is the user's line of
    the first such call. `on_meta` says that neither pass reads values.
    """

    function: Any
    arguments: Any
    kind: str
    where: str
    returned: Any = None
    results: tuple[FunctionTensor, ...] = ()
    on_meta: bool = True
    largest: int = 0  # the largest integer among its arguments or in its code, which may be a size
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path = f"the autograd function {self.function.__qualname__}"

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results of the function's own `apply`, which autograd differentiates by its backward."""
        return split_tensors(self.function.apply(*join_tensors(self.arguments, tensors)))[1]

    def classes(self) -> Iterator[type]:
        """The classes that a process must import to run it."""
        yield self.function


@final
class Functions:
    """The calls of autograd functions recorded while `model` was captured, by key."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[str, FunctionCall] = {}
        self._forms: dict[Any, str] = {}
        self._functions: list[Any] = []  # kept, so that no other gets the same identity
        self._paths = {id(module): path for path, module in model.named_modules()}

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """A context, for this thread, in which calls of autograd functions become operators."""
        token = _now.set(self)
        try:
            with _patches.applied(_patch):
                yield
        finally:
            _now.reset(token)

    def call(self, cls: Any, args: tuple[Any, ...], original: Callable[..., Any]) -> Any:
        """The result of the operator that replaces `cls.apply(*args)` in a trace."""
        arguments, given = split_tensors(args)
        if not given:
            return original(*args)
        key, call = self._known(cls, arguments, given)
        found = function(given, key, call.kind)
        return join_tensors(
            call.returned,
            [
                t if k.requires_grad else t.detach()
                for t, k in zip(found, call.results, strict=True)
            ],
        )

    def _known(self, cls: Any, arguments: Any, given: Sequence[Tensor]) -> tuple[str, FunctionCall]:
        """The key and the record of a function's call; a new form of call is probed."""
        kinds = [FunctionTensor.of(t) for t in given]
        ties = [next(i for i, t in enumerate(given) if t is one) for one in given]
        form = (id(cls), repr(arguments), tuple(kinds), tuple(ties))
        if form not in self._forms:
            frame = users_frame(traceback.extract_stack())
            where = f"{frame.filename}:{frame.lineno}" if frame else "an unknown line"
            call = FunctionCall(cls, arguments, _text(cls, arguments), where)
            # In another thread and context, because tensors of this one are fake.
            try:
                with ThreadPoolExecutor(1) as thread:
                    found = thread.submit(
                        contextvars.Context().run, probe_function, call, kinds
                    ).result()
            except UnfitError as e:
                raise self._refusal(call, e) from e
            call.returned, call.results, call.on_meta = found
            call.largest = _largest(cls, arguments)
            name = cls.__name__
            number = sum(c.function.__name__ == name for c in self.calls.values())
            key = f"{name}#{number}" if number else name
            self._functions.append(cls)
            self._forms[form], self.calls[key] = key, call
            _latest[key, call.kind] = call
            suspect(f"the autograd function {cls.__name__}", where, structure=False)
        key = self._forms[form]
        return key, self.calls[key]

    def _refusal(self, call: FunctionCall, reason: UnfitError) -> CaptureError:
        return CaptureError(
            f"{call.where}: {call.path} {reason}",
            self._module() if reason.keep else "",
            refused=not reason.keep,
        )

    def _module(self) -> str:
        """The path of the innermost module whose code is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path: str | None = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back
        return ""


_now: ContextVar[Functions | None] = ContextVar("functions", default=None)
_scope: ContextVar[Mapping[str, Any]] = ContextVar("calls by key")
_latest: dict[tuple[str, str], FunctionCall] = {}
_rules: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()
_patches = Patches()


@contextmanager
def calls_runnable(calls: Mapping[str, Any]) -> Iterator[None]:
    """A context in which operators of `calls` can be run by their keys."""
    token = _scope.set(calls)
    try:
        yield
    finally:
        _scope.reset(token)


@python_operator(FUNCTION)
def run(tensors: Sequence[Tensor], key: str, kind: str) -> list[Tensor]:
    """The results of the call `key` within `calls_runnable`.

    Elsewhere the latest call of that key and kind is run, on meta tensors only. Raises
    `NotImplementedError` for any other call.
    """
    call = _scope.get({}).get(key)
    if call is None and all(t.is_meta for t in tensors):
        call = _latest.get((key, kind))
    if call is None or (not call.on_meta and any(t.is_meta for t in tensors)):
        raise NotImplementedError(f"{key} can only be run by the program of its model")
    found: list[Tensor] = call(tensors)
    return found


def rule_of(op: Op, pattern: str, discover: Callable[[int], str | None]) -> str:
    """The rule of a call within `calls_runnable`, in index notation; empty if there is none.

    `discover` finds it once for each class, with its plain attributes, and each `pattern`. Its
    argument is the largest integer in the call's arguments and in the code of the class. Where the
    code depends on values there is no rule, because an experiment covers only those that it tries.
    """
    call: FunctionCall = _scope.get()[str(op.args[1])]
    if not call.on_meta:
        return ""
    state = (pattern, repr(sorted(_plain_members(call.function))))
    found = _rules.setdefault(call.function, {})
    if state not in found:
        found[state] = discover(call.largest) or ""
    return found[state]


def _plain_members(cls: Any) -> Iterator[tuple[str, str]]:
    for name, value in vars(cls).items():
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            yield name, repr(value)


def _patch() -> Callable[[], None]:
    """Intercept `apply` of autograd functions while they are captured; returns the undo."""
    before = vars(_BASE).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = before.__get__(None, cls) if before else super(_BASE, cls).apply
        now = _now.get()
        if now is None or kwargs:
            return original(*args, **kwargs)
        if cls.__module__ == _TRANSFORMED and not _is_lookup(cls):
            raise CaptureError(
                "an autograd function is called inside a transform of torch.func, where its"
                " backward cannot be kept; call it outside",
                now._module(),
            )
        own = cls.__module__.startswith(_TRANSPARENT) or _is_lookup(cls)
        if own or (cls.__module__, cls.__name__) == _HOOKS:
            return original(*args)
        return now.call(cls, args, original)

    _BASE.apply = classmethod(apply)

    def undo() -> None:
        if before is None:
            del _BASE.apply
        else:
            _BASE.apply = before

    return undo


def _is_lookup(cls: Any) -> bool:
    """Whether a class is torch's index of mask functions inside `vmap`, which is an `index`."""
    return re.sub("Vmapped|Generated", "", cls.__name__) == "ModIndex"


def _text(cls: Any, arguments: Any) -> str:
    """The class with its arguments other than tensors, equal in every process."""

    def text(value: Any) -> str:
        if isinstance(value, Slot):
            return "_"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(text, value))})"
        if isinstance(value, Mapping):
            return f"({', '.join(f'{k}={text(v)}' for k, v in value.items())})"
        if isinstance(value, _PLAIN):
            return repr(value)
        return str(getattr(value, "__qualname__", type(value).__qualname__))

    return f"{cls.__name__}({', '.join(map(text, arguments))})"


def _largest(cls: Any, arguments: Any) -> int:
    """The largest integer in the arguments of a call or in the code of its class."""

    def of(value: Any) -> int:
        if isinstance(value, tuple | list | frozenset):
            return max(map(of, value), default=0)
        if isinstance(value, Mapping):
            return max(map(of, value.values()), default=0)
        if isinstance(value, CodeType):
            return of(value.co_consts)
        return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 0

    def read(member: Any) -> Iterator[Any]:
        """A member of the class, with the code, the cells and the globals that it reads."""
        member = getattr(member, "__func__", member)
        yield member
        if isinstance(member, FunctionType):
            yield member.__code__
            yield from (cell.cell_contents for cell in member.__closure__ or ())
            yield from (member.__globals__.get(name) for name in member.__code__.co_names)

    own = itertools.takewhile(lambda c: c is not torch.autograd.Function, cls.__mro__)
    members = [m for c in own for name, m in vars(c).items() if not name.startswith("__")]
    return max([of(arguments), *(of(value) for m in members for value in read(m))])
