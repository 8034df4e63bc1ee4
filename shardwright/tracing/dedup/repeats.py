"""Traces repeated modules once.

Most of a deep model is one repeated block, and tracing takes most of the time of a capture. The
first call of a block is traced, and its steps, i.e. its calls of torch, are recorded. A further
call with equal arguments is rehearsed: its code runs on meta tensors, outside of the trace. If its
steps equal those of an earlier call, it becomes a marker operator, which `copies` replaces by a
copy of that call's trace. If they differ, export starts again and also traces that call. Recorded
steps alone decide that two calls are equal; class and source of a block only propose it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwright.tracing.dedup.block_call import BlockCall, shallow_form, tensors_in, with_tensors
from shardwright.tracing.dedup.candidates import Blocks
from shardwright.tracing.dedup.module_steps import FunctionRecorder, TensorMeta, enter, tensor_meta
from shardwright.tracing.dedup.trace_guard import TraceGuard
from shardwright.tracing.patched_forward import replaced_forward

_MOST_FORMS = 4  # a block with this many distinct calls counts as not repeated

torch.library.define(
    "shardwright::repeated", "(Tensor[] operands, Tensor[] results, str key) -> Tensor[]"
)
REPEATED: Any = torch.ops.shardwright.repeated.default
_START = TensorMeta((), (), torch.int8, torch.device("meta"), False)  # the result of a start marker
_now: contextvars.ContextVar[Repeats] = contextvars.ContextVar("repeats")


@torch.library.register_fake("shardwright::repeated")  # type: ignore[untyped-decorator]
def _(operands: list[Tensor], results: list[Tensor], key: str) -> list[Tensor]:
    return [
        torch.empty_strided(k.shape, k.stride, dtype=k.dtype, device=k.device)
        for k in _now.get().expected[key]
    ]


class AbandonedError(Exception):
    """Raised in an export that must be discarded."""


@dataclass(frozen=True)
class TracedCall:
    """The marker operators of one call in the exported graph, by key."""

    traced_number: int  # the number of the equal call that was traced
    sizes: Mapping[str, int]  # marker -> number of results; the first marker has the operands
    start: str = ""  # the key of the start marker; empty if the call was not traced


@final
class Repeats:
    """One export in which repeated blocks are traced once.

    `inline` has the numbers of calls that are known to equal no earlier one. `failed` is the reason
    why the export must be discarded, empty if it can be used, and `differs` the number of the call
    that caused it. Within its context, calls of the blocks of `model` are traced or rehearsed.
    """

    def __init__(self, model: nn.Module, inline: frozenset[int] = frozenset()) -> None:
        self.failed = ""
        self.differs: int | None = None
        self.traced_calls: dict[int, TracedCall] = {}
        self.expected: dict[str, list[TensorMeta]] = {}
        self._model = model
        self._blocks = Blocks.of(model)
        self._inline = inline
        self._known: dict[int, list[BlockCall]] = {}  # traced calls, by block
        self._calls = 0
        self._running: FunctionRecorder | None = None
        self._stack = ExitStack()
        self._traced: type = Tensor

    @property
    def found(self) -> bool:
        """Whether there are candidates for repeated blocks."""
        return bool(self._blocks.paths)

    def __enter__(self) -> Repeats:
        token = _now.set(self)
        self._stack.callback(_now.reset, token)
        self._thread = self._stack.enter_context(ThreadPoolExecutor(1))
        hook = register_module_forward_pre_hook(self._enters)
        self._stack.callback(hook.remove)
        for path in self._blocks.paths:
            self._stack.enter_context(self._replaced(path))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def guard(self, tensors: tuple[Tensor, ...]) -> TraceGuard:
        """The mode in which the model must be traced on `tensors`."""
        self._traced = type(tensors[0]) if tensors else Tensor
        return TraceGuard(self._traced, lambda: bool(self.traced_calls), self.fail)

    def fail(self, reason: str, number: int | None = None) -> AbandonedError:
        """Mark the export as unusable, and return the error to raise."""
        if not self.failed:
            self.failed, self.differs = reason, number
        return AbandonedError(reason)

    @contextmanager
    def _replaced(self, path: str) -> Iterator[None]:
        module, block = self._model.get_submodule(path), self._blocks.paths[path]
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:  # export looks for this name
            return self._call(module, block, run, args, kwargs)

        with replaced_forward(module, forward):
            yield

    def _enters(self, module: nn.Module, args: Any) -> None:
        if self._running is not None:
            self._running.note_module(self._blocks.names.get(id(module)))

    def _call(
        self, module: nn.Module, block: int, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A block's call: traced in place, or rehearsed and replaced by an equal earlier one."""
        known = self._known.setdefault(block, [])
        number, self._calls = self._calls, self._calls + 1
        own: list[Tensor] = [t for _, t in module.named_parameters(remove_duplicate=False)]
        own += [t for _, t in module.named_buffers(remove_duplicate=False)]
        operands = [*tensors_in((args, kwargs)), *own]
        if (
            self._running is not None  # within another block's call
            or len(known) >= _MOST_FORMS
            or self._traced is Tensor
            or not all(type(t) is self._traced for t in operands)
        ):
            return run(*args, **kwargs)
        given = self._in_own_thread(lambda: shallow_form((args, kwargs)))
        candidates = [call for call in known if call.given == given]
        rehearsal = bool(candidates) and number not in self._inline
        call = BlockCall(number, given, FunctionRecorder(operands, rehearsal=rehearsal))
        if rehearsal:
            return self._rehearsed(call, candidates, run, args, kwargs)
        return self._traced_inline(call, known, run, args, kwargs)

    def _traced_inline(
        self,
        call: BlockCall,
        known: list[BlockCall],
        run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace a call between a start marker and end markers."""
        start, operands = f"{call.number}.", call.steps.operands
        self.expected[start] = [_START]
        (begin,) = REPEATED(operands, [], start)
        with self._noting(call.steps), call.steps:
            returned = enter(run, args, kwargs)
        self._in_own_thread(lambda: call.end(returned))
        if call.steps.refused:
            known += [call] * _MOST_FORMS
            return returned
        known.append(call)
        return self._put(call, call, [*operands, begin], call.results, returned, start)

    def _rehearsed(
        self,
        call: BlockCall,
        candidates: Sequence[BlockCall],
        run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Rehearse a call and replace it by marker operators.

        Raises `AbandonedError` if it equals none of `candidates`, or fails.
        """

        def rehearsed() -> Any:
            call.steps.prepare()
            with call.steps:
                returned = enter(run, args, kwargs)
            call.end(returned)
            return returned

        try:
            with self._noting(call.steps):
                returned = self._in_own_thread(rehearsed)
        except Exception as e:
            raise self.fail(f"a call cannot be rehearsed: {e}", call.number) from e
        for other in candidates:
            if call.traces_equally(other):
                return self._put(call, other, call.steps.operands, [], returned)
        raise self.fail("a call is like none before", call.number)

    def _put(
        self,
        call: BlockCall,
        like: BlockCall,
        operands: Sequence[Tensor],
        results: list[Tensor],
        returned: Any,
        start: str = "",
    ) -> Any:
        """The value `returned` by `call`, with its tensors replaced by results of end markers.

        `like` is the equal call that was traced. `results` are the traced tensors, if `call` was
        traced itself.
        """
        kinds = [like.kind(t) for t in like.results]
        sizes: dict[str, int] = {}
        made: dict[int, Tensor] = {}
        for grad in (True, False):  # all results of one operator require gradients, or none do
            group = [i for i, kind in enumerate(kinds) if kind.requires_grad is grad]
            if group:
                key = f"{call.number}/{len(sizes)}"
                self.expected[key] = [kinds[i] for i in group]
                given = [results[i] for i in group] if results else []
                found = REPEATED([] if sizes else operands, given, key)
                made.update(zip(group, found, strict=True))
                sizes[key] = len(group)
        if self._in_own_thread(lambda: [tensor_meta(made[i]) for i in range(len(kinds))]) != kinds:
            raise self.fail("results cannot be put in their place", call.number)
        self.traced_calls[call.number] = TracedCall(like.number, sizes, start)
        new = {id(t): made[i] for i, t in enumerate(call.results)}
        return with_tensors(returned, lambda t: new.get(id(t), call.steps.original(t)))

    @contextmanager
    def _noting(self, steps: FunctionRecorder) -> Iterator[None]:
        self._running = steps
        try:
            yield
        finally:
            self._running = None

    def _in_own_thread(self, work: Callable[[], Any]) -> Any:
        """Run `work` in another thread, outside of the trace: torch's modes are thread-local."""
        context, grad = contextvars.copy_context(), torch.is_grad_enabled()

        def alone() -> Any:
            with torch.set_grad_enabled(grad):
                return context.run(work)

        return self._thread.submit(alone).result()
