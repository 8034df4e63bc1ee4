"""Detects tensors of a rehearsal that got into the trace, e.g. through a cache of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor
from torch.overrides import TorchFunctionMode


@final
class TraceGuard(TorchFunctionMode):
    """A mode in which every tensor read must have the type `traced`, or be made in this mode.

    `begun` says whether a call of a block has been traced or rehearsed; reads are checked from then
    on. `fail` makes the error to raise from its reason.
    """

    def __init__(
        self, traced: type, begun: Callable[[], bool], fail: Callable[[str], Exception]
    ) -> None:
        super().__init__()
        self._traced = traced
        self._begun = begun  # whether reads are checked
        self._fail = fail
        self._constants: dict[int, Tensor] = {}  # made in this mode, by identity

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._begun() and getattr(func, "__name__", "") != "__get__":
            self._check((args, kwargs))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and type(result) is not self._traced:
            self._constants[id(result)] = result
        return result

    def _check(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if type(value) is not self._traced and id(value) not in self._constants:
                raise self._fail("a tensor is read that is no part of the trace")
        elif isinstance(value, tuple | list):
            for part in value:
                self._check(part)
        elif isinstance(value, Mapping):
            for part in value.values():
                self._check(part)
