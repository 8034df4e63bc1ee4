"""Traces of the memory of operator calls, kept from one command on a config to the next.

Only torch can trace a call (`tracing/op_memory`), so a command that finds all calls here does
not import it. Entries are JSON, by digests of the calls (`ir/op_memory.py`); one that is damaged
is ignored, and calls are traced again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from shardwright.ir.graph import ITEM_BYTES, Op
from shardwright.ir.op_memory import (
    BackwardMemory,
    CallMemory,
    ForwardMemory,
    OpTracer,
    Seen,
    Strides,
    call_key,
)
from shardwright.plan_io.checks import of_type, size
from shardwright.train.targets.user_cache import UserCache, digest_of

_FORMAT = 1
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError)
_Gradients = tuple[Strides | None, ...]


def new_tracer(*, on_cpu: bool) -> OpTracer:
    """A tracer that keeps nothing."""
    from shardwright.tracing.op_memory.footprints import Footprints

    return Footprints(on_cpu=on_cpu)


@dataclass
class _Traces:
    """The traces of one call, as far as they are known."""

    forward: ForwardMemory | None = None
    has_forward: bool = False
    backward: dict[_Gradients, BackwardMemory] = field(default_factory=dict)


@final
class KeptTraces:
    """The traces of one capture, for ranks on CPUs or on accelerators.

    `key` is that of the capture. `make` makes the tracer of calls that are not known.
    """

    def __init__(
        self, key: str, *, on_cpu: bool, make: Callable[..., OpTracer] = new_tracer
    ) -> None:
        self._key = digest_of(f"{key} {_FORMAT} {on_cpu}")
        self._on_cpu, self._make = on_cpu, make
        self._tracer: OpTracer | None = None
        self._calls: dict[Hashable, _KeptCall] = {}  # by `call_key`: digests take longer
        self._known = _read(self._key)
        self.is_new = False

    def call(self, op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> CallMemory:
        """The call of `op` on operands `given`, whose names are `names`; equal calls share one."""
        key = call_key(op, names, given)
        if (found := self._calls.get(key)) is None:
            traces = self._known.setdefault(digest_of(repr(key)), _Traces())
            found = self._calls[key] = _KeptCall(self, traces, (op, names, given))
        return found

    def traced(self, call: tuple[Op, Sequence[str], tuple[Seen, ...]]) -> CallMemory:
        """The call with the tracer that traces."""
        self.is_new = True
        if self._tracer is None:
            self._tracer = self._make(on_cpu=self._on_cpu)
        return self._tracer.call(*call)

    def keep(self) -> None:
        """Write all traces to the cache, if there are new ones."""
        if self.is_new:
            _entries().keep(self._key, _encoded(self._key, self._known))
            self.is_new = False


@final
class _KeptCall:
    """A call whose traces are known, or become known when they are first read."""

    def __init__(
        self,
        kept: KeptTraces,
        traces: _Traces,
        call: tuple[Op, Sequence[str], tuple[Seen, ...]],
    ) -> None:
        self._kept, self._traces, self._call = kept, traces, call

    @property
    def forward(self) -> ForwardMemory | None:
        """The trace of the forward pass; None if it cannot be traced."""
        traces = self._traces
        if not traces.has_forward:
            traces.forward, traces.has_forward = self._kept.traced(self._call).forward, True
        return traces.forward

    def backward(self, gradients: _Gradients) -> BackwardMemory:
        """The trace of the backward pass, for these strides of the results' gradients."""
        known = self._traces.backward
        if gradients not in known:
            known[gradients] = self._kept.traced(self._call).backward(gradients)
        return known[gradients]

    @property
    def has_forward(self) -> bool:
        """Whether the forward pass is traced already."""
        return self._traces.has_forward

    def has_backward(self, gradients: _Gradients) -> bool:
        """Whether the backward pass is traced already."""
        return gradients in self._traces.backward


def _entries() -> UserCache:
    return UserCache.of_user("traces")


def _read(key: str) -> dict[str, _Traces]:
    text = _entries().find(key)
    if text is None:
        return {}
    try:
        content = json.loads(text)
        if content["key"] != key:
            return {}
        return {of_type(name, str): _decoded(one) for name, one in content["calls"].items()}
    except _DAMAGED:  # the calls are traced again, and the entry replaced
        return {}


def _encoded(key: str, known: dict[str, _Traces]) -> str:
    calls = {
        name: {
            "forward": [_of_forward(one.forward)] if one.has_forward else [],
            "backward": [
                [gradients, found.events, found.gradients]
                for gradients, found in one.backward.items()
            ],
        }
        for name, one in known.items()
    }
    return json.dumps({"key": key, "calls": calls})


def _of_forward(found: ForwardMemory | None) -> Any:
    return None if found is None else [found.results, found.made, found.saved, found.peak]


def _decoded(given: Any) -> _Traces:
    """The traces of a call; raises one of `_DAMAGED` for what `_encoded` did not write."""
    found = _Traces(has_forward=bool(given["forward"]))
    if found.has_forward:
        (forward,) = given["forward"]
        if forward is not None:
            results, made, saved, peak = forward
            found.forward = ForwardMemory(
                tuple(_result(one) for one in results), _sizes(made), _sizes(saved), size(peak)
            )
    for strides, events, gradients in given["backward"]:
        asked = tuple(None if one is None else _sizes(one) for one in strides)
        made = tuple((size(number), _born(count)) for number, count in events)
        ends = tuple(None if one is None else (size(one[0]), _sizes(one[1])) for one in gradients)
        found.backward[asked] = BackwardMemory(made, ends)
    return found


def _result(given: Any) -> tuple[int, tuple[int, ...], Strides, str] | None:
    if given is None:
        return None
    storage, shape, strides, dtype = given
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{dtype!r} is no dtype")
    return size(storage), _sizes(shape), _sizes(strides), dtype


def _sizes(given: Any) -> tuple[int, ...]:
    return tuple(map(size, of_type(given, list)))


def _born(count: Any) -> int:
    """Bytes of a storage, or -1 where it is dropped."""
    return -1 if count == -1 else size(count)
