"""Records the `torch` functions that a module's code calls.

Two calls with equal steps have equal traces, because a trace depends only on the functions of torch
that the code calls, their order, their arguments and the modes in which they are called. Equal
steps also come from the same instructions of the same code objects, so that the operators have
equal sources.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, EllipsisType, FrameType, FunctionType, NoneType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.tracing.export.operators import MAKING, OVERLOAD

_PLAIN = (
    int, bool, str, NoneType, EllipsisType, torch.Size,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_NAMED = (type, FunctionType, BuiltinFunctionType, OVERLOAD)
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
_WRITING = frozenset(("__setitem__", "__set__", "__delete__", "batch_norm", "instance_norm"))
# Writes that are steps as others if they go to a tensor that the call made.
_WRITES_OF_VALUES = frozenset(
    (
        *("__setitem__", "index_put_", "index_add_", "index_copy_", "index_fill_", "scatter_"),
        *("scatter_add_", "masked_fill_", "masked_scatter_", "fill_", "copy_", "zero_"),
        *("add_", "sub_", "mul_", "div_"),
    )
)
_REGIONS = ("_set_grad_enabled", "_enter_autocast")  # export turns these regions into sub-graphs
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
    "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip


class NotComparableError(Exception):
    """Raised for a call that cannot be compared with others."""


def enter(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `run`; the call stack of a step is recorded from this frame inwards."""
    return run(*args, **kwargs)


@final
class FunctionRecorder(TorchFunctionMode):
    """A mode that records each function of torch that is called.

    Tensors are identified by numbers: the `operands` first, then the results of recorded functions.
    A call that reads any other tensor cannot be compared. In a rehearsal, outside of the trace,
    meta tensors replace the operands. `refused` is the reason why the call cannot be compared;
    empty if it can.
    """

    def __init__(self, operands: Sequence[Tensor], *, rehearsal: bool) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self._numbers: dict[int, int] = {}  # by identity
        self.tensors: list[Tensor] = []  # by number
        self.refused = ""
        self.operands = tuple({id(t): t for t in operands}.values())
        self._number(self.operands)
        self.pattern = tuple(self._numbers[id(t)] for t in operands)  # a tensor may be passed twice
        self._twins: dict[int, Tensor] = {}  # meta tensors, by identity of their operands
        self._twinned: dict[int, Tensor] = {}  # the operands, by identity of their twins
        self._rehearsal = rehearsal
        self._new: set[int] = set()  # identities of tensors that the call made in own memory
        self._codes: dict[int, CodeType] = {}  # kept, so that no other gets the same identity

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            read = func(*args)
            if not isinstance(read, Tensor):
                return read  # e.g. a shape, which is determined by compared values
        if self.refused and not self._rehearsal:
            return func(*args, **kwargs)
        try:
            writing = writes(name, kwargs) and not self._writes_to_new(name, args)
            if writing or name in _REGIONS:
                raise NotComparableError(f"{name} does more than to compute")
            given = (self.comparable(args), self.comparable(dict(kwargs)))
        except NotComparableError as e:
            self.refused = str(e)
            if self._rehearsal:
                raise
            return func(*args, **kwargs)
        if self._rehearsal:
            args, kwargs = self._swapped(args), self._swapped(dict(kwargs))
        result = func(*args, **kwargs)
        if name in MAKING:
            made = result if isinstance(result, tuple) else (result,)
            self._new.update(id(tensor) for tensor in made)
        modes = (torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _AUTOCAST))
        try:
            self.steps.append(
                (func, given, modes, self._lines(), self.comparable(result, made=True))
            )
        except NotComparableError as e:
            self.refused = str(e)
        return result

    def _writes_to_new(self, name: str, args: Sequence[Any]) -> bool:
        """Whether a function writes values to a tensor that this call made, its first argument."""
        return name in _WRITES_OF_VALUES and bool(args) and id(args[0]) in self._new

    def prepare(self) -> None:
        """Create the meta tensors of a rehearsal.

        Must run outside of the trace, which would record the reads of the operands' metadata.
        """
        for operand in self.operands:
            kind = tensor_meta(operand)
            twin = torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")
            self._twins[id(operand)] = twin.requires_grad_(kind.requires_grad)
            self._twinned[id(twin)] = operand
            self._numbers[id(twin)] = self._numbers[id(operand)]

    def note_module(self, name: str | None) -> None:
        """Record the call of a module of the block; None means another module, which is refused."""
        self.steps.append(name)
        if name is None:
            self.refused = "a module outside is called"

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor that was seen before, or None."""
        return self._numbers.get(id(tensor))

    def is_made(self, tensor: Tensor) -> bool:
        """Whether the tensor is a result of a recorded function."""
        return self._numbers.get(id(tensor), 0) >= len(self.operands)

    def comparable(self, value: Any, *, made: bool = False) -> Any:
        """A description of a value, equal for equal values of two calls.

        With `made`, the value is a result, and its tensors get new numbers; otherwise it is an
        argument. Raises `NotComparableError` for a type or a tensor that cannot be compared.
        """
        if isinstance(value, Tensor):
            if made:  # x.to(x.dtype) is x, but a new node in a trace
                self._number([value])
                for other in (self._twins.get(id(value)), self._twinned.get(id(value))):
                    if other is not None:
                        self._numbers[id(other)] = self._numbers[id(value)]
            elif id(value) not in self._numbers:
                raise NotComparableError("a tensor is read that is none of the operands")
            return Tensor, self._numbers[id(value)]
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # 0.0 equals -0.0
        if isinstance(value, tuple | list):
            return kind, tuple([self.comparable(v, made=made) for v in value])
        if kind is slice:
            return kind, self.comparable((value.start, value.stop, value.step))
        if kind is dict:
            return kind, tuple((key, self.comparable(v, made=made)) for key, v in value.items())
        if isinstance(value, _NAMED):
            return kind, value
        raise NotComparableError(f"torch is given a {kind.__name__}")

    def _number(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)

    def original(self, tensor: Tensor) -> Tensor:
        """The operand that the meta tensor `tensor` replaces; any other tensor itself."""
        return self._twinned.get(id(tensor), tensor)

    def _swapped(self, value: Any) -> Any:
        """`value` with its operands replaced by meta tensors."""
        if isinstance(value, Tensor):
            return self._twins.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)([self._swapped(v) for v in value])
        if type(value) is dict:
            return {key: self._swapped(v) for key, v in value.items()}
        return value

    def _lines(self) -> tuple[int, ...]:
        """Code identities and instruction offsets, from the caller of torch out to `enter`."""
        found: list[int] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not enter.__code__:
            code = frame.f_code
            self._codes[id(code)] = code
            found += (id(code), frame.f_lasti)
            frame = frame.f_back
        return tuple(found)


class TensorMeta(NamedTuple):
    """The metadata of a tensor; `stride` is in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def tensor_meta(t: Tensor) -> TensorMeta:
    """The metadata of a dense tensor; raises `NotComparableError` for others."""
    if t.layout is not torch.strided:
        raise NotComparableError("a tensor is not strided")
    return TensorMeta(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may write to its arguments."""
    if name.startswith("__"):
        return name in _WRITING or (name[2] == "i" and name[3:].strip("_") in _OPERATORS)
    return name.endswith("_") or name in _WRITING or "out" in kwargs or bool(kwargs.get("inplace"))
