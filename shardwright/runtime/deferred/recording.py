"""Records what a constructor computes, on tensors without memory, so that it can be computed later.

Tensors of a recorded call are on the meta device. Small ones that are not random stay real, so that
a constructor can read them, as `torch.linspace(0, 0.1, 12).tolist()`; what else is read by Python
is computed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, final

import numpy
import torch
from torch.overrides import TorchFunctionMode

from shardwright.runtime.deferred.random_states import RandomStates
from shardwright.runtime.deferred.replay import Replay
from shardwright.runtime.deferred.steps import (
    EMPTY,
    Constant,
    Step,
    TensorRef,
    leaves,
    mapped,
    operator_name,
    written,
)
from shardwright.runtime.parameters.storage_view import StorageView
from shardwright.tracing.torch_private import TorchDispatchMode

_SMALL = 2**16  # bytes
_CPU, _META = torch.device("cpu"), torch.device("meta")


@final
class Recording(TorchDispatchMode):
    """A context that records operator calls; `replay` computes tensors that were made in it.

    Args:
        small: bytes from which on tensors have no memory.
    """

    def __init__(self, small: int = _SMALL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.small = small
        self.steps: list[Step] = []
        self.storages: list[torch.UntypedStorage] = []  # by number
        self.numbers: dict[int, int] = {}  # id of a storage -> its number
        self.ordinary = _OrdinaryTensors(self)
        self.busy = False  # whether a call is being recorded
        self.states = RandomStates(self._draw)
        self.replay = Replay(self.steps, self.states)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.ordinary.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.ordinary.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.busy:  # values are being computed
            return func(*args, **(kwargs or {}))
        self.busy = True
        try:
            return self._called(func, args, kwargs or {})
        finally:
            self.busy = False

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that `tensor` has after the calls so far."""
        self.busy = True
        try:
            return self.replay.whole(self.ref(tensor))
        finally:
            self.busy = False

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a call: recorded on the meta device; run where they depend on values."""
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(t.is_meta for t in tensors) and not self._has_no_memory(
            func, tensors, args, kwargs
        ):
            return self._run(func, args, kwargs)
        changed = written(func, args, kwargs)
        if any(isinstance(t, torch.Tensor) and not t.is_meta for t in changed):
            return self._run(func, *self._valued((args, kwargs)))
        try:
            results = func(*_on_meta(args), **_on_meta(kwargs))
        except (NotImplementedError, RuntimeError):  # its result depends on values
            # What is wrong with the call itself is raised by the call with memory, now or later.
            if not changed:
                return self._run(func, *self._valued((args, kwargs)))
            results = changed[0]
        if not all(isinstance(one, torch.Tensor | None) for one in leaves(results)):
            return self._run(func, *self._valued((args, kwargs)))
        self._record(func, args, kwargs, list(leaves(results)))
        # An operator in place returns its argument itself, which may be a parameter.
        return changed[0] if changed and isinstance(results, torch.Tensor) else results

    def ref(self, tensor: torch.Tensor) -> TensorRef:
        """The reference to a tensor without memory."""
        storage = tensor.untyped_storage()
        number = self.numbers.get(id(storage))
        if number is None:
            number = self.numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
        return TensorRef(number, storage.nbytes(), StorageView.of(tensor))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded call has made or changed the tensor."""
        return id(tensor.untyped_storage()) in self.numbers

    def _has_no_memory(
        self, func: Any, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any
    ) -> bool:
        """Whether the results of a call on tensors with memory shall have none."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return True
        if device is not None and torch.device(device).type != "cpu":
            return False
        if written(func, args, kwargs) or any(t.device != _CPU for t in tensors):
            return False
        name = operator_name(func)
        if name in EMPTY or _draws(func):
            return True
        if func.is_view:  # a write to it changes the tensor, which has memory
            return False
        try:
            results = list(leaves(func(*_on_meta(args), **_on_meta(kwargs))))
        except (NotImplementedError, RuntimeError):  # with memory it works, or raises its error
            return False
        new = [one for one in results if isinstance(one, torch.Tensor)]
        return sum(t.untyped_storage().nbytes() for t in new) >= self.small

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call on tensors with memory, now."""
        if not _draws(func):
            return func(*args, **kwargs)
        generator = _generator(args, kwargs)
        self.states.restore(generator)
        return func(*args, **kwargs)

    def _valued(self, given: Any) -> Any:
        """`given` with the values of its tensors."""

        def value(leaf: Any) -> Any:
            known = isinstance(leaf, torch.Tensor) and leaf.is_meta
            return self.replay.whole(self.ref(leaf)) if known else leaf

        return mapped(given, value)

    def _record(self, func: Any, args: Any, kwargs: Any, results: list[Any]) -> None:
        """Record a call that makes, draws or changes values; views need none."""
        if operator_name(func) in EMPTY:
            return
        generator = _generator(args, kwargs)
        draws = _draws(func)

        def kept(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self.ref(leaf) if leaf.is_meta else Constant(leaf.clone())
            if isinstance(leaf, torch.Generator):
                return torch.default_generator  # which gets the state of that one
            return _CPU if isinstance(leaf, torch.device) else leaf

        had = {id(t.untyped_storage()) for t in leaves((args, kwargs)) if _is_meta(t)}
        made = {
            i: self.ref(t)
            for i, t in enumerate(results)
            if _is_meta(t) and id(t.untyped_storage()) not in had
        }
        given, named = mapped(args, kept), mapped(kwargs, kept)
        if not made and not written(func, args, kwargs):
            return  # a view
        before = self.states.now(generator) if draws else None
        step = Step(len(self.steps), func, given, named, made, draws, before)
        self.steps.append(step)
        if draws:
            self.states.mark(generator, step)

    def _draw(self, step: Step) -> None:
        self.replay.draw(step)


@final
class _OrdinaryTensors(TorchFunctionMode):
    """A context in which tensors of a recording look as if they were on the CPU.

    `torch.nn.init` passes over tensors on the meta device, and so do other initialisers.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.recording.busy:
            if func in _ANSWERS:
                return _ANSWERS[func] if _is_meta_inside(args[0]) else func(*args)
            if func in _READS:
                return self._read(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of reading a tensor, whose values are computed if it has no memory."""
        tensor, *others = args
        without = _is_meta_inside(tensor)
        if without:
            tensor = self.recording.value(tensor.detach())
        self.recording.busy = True  # it calls operators, such as `detach`, to read from the result
        try:
            found = func(tensor, *others, **kwargs)
        finally:
            self.recording.busy = False
        if without and isinstance(found, numpy.ndarray):
            found.setflags(write=False)  # nothing would notice
        return found


_ANSWERS: dict[Any, Any] = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: _CPU,
}
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


def _is_meta_inside(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _generator(args: Any, kwargs: Any) -> torch.Generator:
    given = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
    return next(given, torch.default_generator)


def _on_meta(given: Any) -> Any:
    """`given` with tensors, devices and generators of the meta device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_meta:
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=_META)
        if isinstance(leaf, torch.Generator):
            return None
        return _META if isinstance(leaf, torch.device) else leaf

    found = mapped(given, moved)
    if isinstance(found, dict):
        if "pin_memory" in found:
            found["pin_memory"] = False
        if "device" in found and found["device"] is None:
            found["device"] = _META
    return found
