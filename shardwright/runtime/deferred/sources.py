"""The values of a module without memory: each rank computes or reads the tiles that it stores."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardwright.ir.plan import PlanError
from shardwright.runtime.deferred.ranges import Ranges, narrowed, whole_of
from shardwright.runtime.deferred.recording import Recording
from shardwright.runtime.deferred.replay import NoValueError
from shardwright.runtime.deferred.steps import Constant, Step, leaves, mapped

_INSTEAD = (
    "give parallelize the function that builds the model, as in sw.parallelize(lambda: Model(),"
    " plan), or build it on a real device"
)


class TensorSources(ABC):
    """The origin of the values of a module's tensors, which have their names in the module."""

    @abstractmethod
    def tile(self, name: str, tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        """The elements of `tensor` within `ranges`, on the CPU, contiguous."""

    @abstractmethod
    def has(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether it can give the values of `tensor`."""

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The values of `tensor`, on the CPU."""
        return self.tile(name, tensor, whole_of(tensor.shape))

    def check(self, model: nn.Module) -> None:
        """Raise `PlanError` that names a parameter or buffer without values."""
        missing = [name for name, t in _named(model) if t.is_meta and not self.has(name, t)]
        if missing:
            more = f" ({len(missing)} tensors have none)" if len(missing) > 1 else ""
            raise PlanError(
                f"nothing gives {missing[0]} of {type(model).__name__} its values{more}; {_INSTEAD}"
            )

    @abstractmethod
    def digest(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """A number that differs, all but surely, between ranks with other values of `tensors`."""


_known: WeakKeyDictionary[nn.Module, TensorSources] = WeakKeyDictionary()


@final
class RecordedSources(TensorSources):
    """Values that a recording computes; tensors with memory, as they are, by `keep`."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.kept: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without memory that stands for `tensor`, which has some."""
        value = tensor.detach()
        empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        storage = empty.untyped_storage()
        self.kept[id(storage)] = storage, value
        return empty

    def tile(self, name: str, tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        kept = self.kept.get(id(tensor.untyped_storage()))
        if kept is not None:
            return narrowed(kept[1], ranges).cpu().clone(memory_format=torch.contiguous_format)
        try:
            return self.recording.replay.tile(self.recording.ref(tensor.detach()), ranges)
        except NoValueError as e:
            raise PlanError(f"{name}: {e}; {_INSTEAD}") from e

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        if id(tensor.untyped_storage()) in self.kept:
            return True
        if not self.recording.knows(tensor):
            return False
        try:
            self.recording.replay.check(self.recording.ref(tensor.detach()))
        except NoValueError:
            return False
        return True

    def digest(self, tensors: Mapping[str, torch.Tensor]) -> int:
        replay, found = self.recording.replay, 0
        needed: dict[int, Step] = {}
        for tensor in tensors.values():
            kept = self.kept.get(id(tensor.untyped_storage()))
            if kept is not None:
                found = _crc(kept[1], found)
            elif self.recording.knows(tensor):
                steps = replay.steps_of(self.recording.ref(tensor.detach()))
                needed.update((step.number, step) for step in steps)
        for _, step in sorted(needed.items()):
            found = _crc_of_call(step, found)
        drawn = sorted(number for number, step in needed.items() if step.draws)
        if not drawn:
            return found
        states = [one.before for one in self.recording.steps]
        for state in states:
            found = _crc(state, found) if isinstance(state, torch.Tensor) else found
        return zlib.crc32(repr((drawn, len(states))).encode(), found)

    def finish(self) -> None:
        """Leave random generators as the calls would have left them."""
        self.recording.states.finish()


def sources_of(model: nn.Module) -> TensorSources | None:
    """The values of a module that `deferred` built; None for another module."""
    return _known.get(model)


def set_sources(model: nn.Module, sources: TensorSources) -> None:
    """Let `sources_of(model)` be `sources` as long as there is the model."""
    _known[model] = sources


@contextmanager
def with_sources(model: nn.Module, sources: TensorSources | None) -> Iterator[None]:
    """A context in which `sources_of(model)` is `sources`."""
    before = _known.get(model)
    if sources is not None:
        _known[model] = sources
    try:
        yield
    finally:
        _known.pop(model, None)
        if before is not None:
            _known[model] = before


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """The module that `make` builds, without memory; `sources_of` has its values.

    They are those that `make` would give the module now, bit for bit. Tensors that are no random
    numbers and have less than 64 KiB are computed at once. Random generators keep their states.
    """
    recording = Recording()
    sources = RecordedSources(recording)
    try:
        with recording:
            model = make()
    finally:
        recording.states.pause()
    if isinstance(model, nn.Module):
        without_memory(model, sources)
        set_sources(model, sources)
    return model


def give_memory(model: nn.Module, sources: TensorSources) -> None:
    """Replace the tensors of `model` that have no memory by their values, on the CPU."""
    memo: dict[int, torch.Tensor] = {}
    before: list[torch.Tensor] = []  # kept alive, so that no id is used twice

    def replaced(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
        if id(leaf) not in memo:
            value = sources.whole(name, leaf)
            if isinstance(leaf, nn.Parameter):
                value = nn.Parameter(value, requires_grad=leaf.requires_grad)
            value.__dict__.update(leaf.__dict__)
            memo[id(leaf)] = value
            before.append(leaf)
        return memo[id(leaf)]

    for path, module in list(model.named_modules()):
        for values, name, value in _with_tensors(module):
            full = f"{path}.{name}" if path else name
            values[name] = mapped(value, partial(replaced, full))
    _known.pop(model, None)


def initialized(model: nn.Module, init: Callable[[nn.Module], object]) -> TensorSources:
    """The values that `init` gives the tensors of `model`, which is on the meta device."""
    recording = Recording()
    sources = RecordedSources(recording)
    try:
        with recording, torch.no_grad():
            init(model)
    finally:
        recording.states.pause()
    without_memory(model, sources)
    return sources


def without_memory(model: nn.Module, sources: RecordedSources) -> None:
    """Replace the tensors of `model` that have memory by ones that `sources` keep the values of.

    Tensors that are plain attributes, or in lists and dicts that are, count too.
    """
    memo: dict[int, torch.Tensor] = {}
    before: list[torch.Tensor] = []  # kept alive, so that no id is used twice

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return leaf
        if id(leaf) not in memo:
            empty = sources.keep(leaf)
            if isinstance(leaf, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=leaf.requires_grad)
            empty.__dict__.update(leaf.__dict__)
            memo[id(leaf)] = empty
            before.append(leaf)
        return memo[id(leaf)]

    for module in list(model.modules()):
        for values, name, value in _with_tensors(module):
            values[name] = mapped(value, replaced)


def _with_tensors(module: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Parameters, buffers, and attributes that are or hold tensors: (dict, name, value)."""
    own = {name for name in module.__dict__ if name not in ("_parameters", "_buffers")}
    every: list[tuple[dict[str, Any], str, Any]] = [
        *((module._parameters, name, value) for name, value in module._parameters.items()),
        *((module._buffers, name, value) for name, value in module._buffers.items()),
        *((module.__dict__, name, module.__dict__[name]) for name in sorted(own)),
    ]
    return [one for one in every if any(isinstance(x, torch.Tensor) for x in leaves(one[2]))]


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors that are attributes of modules or in lists that are."""
    found = dict(_named(model))
    for path, module in model.named_modules():
        for values, name, value in _with_tensors(module):
            if values is module.__dict__:
                tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
                found |= {f"{path}.{name}.{i}": tensor for i, tensor in enumerate(tensors)}
    return found


def _crc_of_call(step: Step, start: int) -> int:
    """Of the operator, and of the numbers and the tensors with memory that it was given."""
    plain: list[Any] = [step.name]
    for leaf in leaves((step.args, step.kwargs)):
        if isinstance(leaf, Constant):
            start = _crc(leaf.value, start)
        elif isinstance(leaf, bool | int | float | complex | str):
            plain.append(leaf)
    return zlib.crc32(repr(plain).encode(), start)


def _crc(tensor: torch.Tensor, start: int) -> int:
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data.tobytes(), start)
