"""Traces repeated modules once.

Most of a deep model is one block over and over, and tracing is most of a
capture. The first call of a block is traced in line, and its steps are noted. A
further call is rehearsed: its code runs on meta tensors, unseen by the trace. Where
its steps are those of a call before, it becomes one operator, for which `copies`
puts a copy of what that call was traced to. Where they differ, export starts
again and traces that call in line as well. Nothing is assumed about the code.
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

from shardwright.tracing.dedup.block_call import BlockCall, at_a_glance, exchanged, tensors_in
from shardwright.tracing.dedup.candidates import Blocks
from shardwright.tracing.dedup.module_steps import Kind, Steps, enter, kind_of
from shardwright.tracing.dedup.trace_guard import Watch
from shardwright.tracing.patched_forward import called_as

_MOST_FORMS = 4  # of one block, before it counts as one that does not repeat

torch.library.define(
    "shardwright::repeated", "(Tensor[] operands, Tensor[] results, str key) -> Tensor[]"
)
REPEATED: Any = torch.ops.shardwright.repeated.default
_START = Kind((), (), torch.int8, torch.device("meta"), False)  # of what marks a beginning
_now: contextvars.ContextVar[Repeats] = contextvars.ContextVar("repeats")


@torch.library.register_fake("shardwright::repeated")  # type: ignore[untyped-decorator]
def _(operands: list[Tensor], results: list[Tensor], key: str) -> list[Tensor]:
    return [
        torch.empty_strided(k.shape, k.stride, dtype=k.dtype, device=k.device)
        for k in _now.get().expected[key]
    ]


class AbandonedError(Exception):
    """An export that cannot be used."""


@dataclass(frozen=True)
class Placed:
    """How a call stands in the exported graph: at the operators of these keys."""

    like: int  # the number of the call that was traced in line
    sizes: Mapping[str, int]  # how many results each has; the first has the operands
    start: str = ""  # the key of the operator before what was traced in line


@final
class Repeats:
    """One export in which blocks that repeat are traced once.

    `inline` are the numbers of calls that are known to be like none before.
    `failed` says why what was exported must not be used, and `differs` is the
    number of the call at fault.
    """

    def __init__(self, model: nn.Module, inline: frozenset[int] = frozenset()) -> None:
        self.failed = ""
        self.differs: int | None = None
        self.placed: dict[int, Placed] = {}
        self.expected: dict[str, list[Kind]] = {}
        self._model = model
        self._blocks = Blocks.of(model)
        self._inline = inline
        self._known: dict[int, list[BlockCall]] = {}  # traced in line, by block
        self._calls = 0
        self._running: Steps | None = None
        self._stack = ExitStack()
        self._traced: type = Tensor

    @property
    def found(self) -> bool:
        """Whether anything looks as if it repeats."""
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

    def watch(self, tensors: tuple[Tensor, ...]) -> Watch:
        """To be entered while the model is traced on `tensors`."""
        self._traced = type(tensors[0]) if tensors else Tensor
        return Watch(self._traced, lambda: bool(self.placed), self.fail)

    def fail(self, reason: str, number: int | None = None) -> AbandonedError:
        """Note, and return to be raised, that the export must not be used."""
        if not self.failed:
            self.failed, self.differs = reason, number
        return AbandonedError(reason)

    @contextmanager
    def _replaced(self, path: str) -> Iterator[None]:
        module, block = self._model.get_submodule(path), self._blocks.paths[path]
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:  # a name that stack traces of export keep
            return self._call(module, block, run, args, kwargs)

        with called_as(module, forward):
            yield

    def _enters(self, module: nn.Module, args: Any) -> None:
        if self._running is not None:
            self._running.note_module(self._blocks.names.get(id(module)))

    def _call(
        self, module: nn.Module, block: int, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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
        given = self._aside(lambda: at_a_glance((args, kwargs)))
        alike = [call for call in known if call.given == given]
        rehearsal = bool(alike) and number not in self._inline
        call = BlockCall(number, given, Steps(operands, rehearsal=rehearsal))
        if rehearsal:
            return self._compared(call, alike, run, args, kwargs)
        return self._in_line(call, known, run, args, kwargs)

    def _in_line(
        self,
        call: BlockCall,
        known: list[BlockCall],
        run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace a call as it is, between two operators that say where it starts and ends."""
        start, operands = f"{call.number}.", call.steps.operands
        self.expected[start] = [_START]
        (begin,) = REPEATED(operands, [], start)
        with self._noting(call.steps), call.steps:
            returned = enter(run, args, kwargs)
        self._aside(lambda: call.end(returned))
        if call.steps.refused:
            known += [call] * _MOST_FORMS
            return returned
        known.append(call)
        return self._put(call, call, [*operands, begin], call.results, returned, start)

    def _compared(
        self,
        call: BlockCall,
        alike: Sequence[BlockCall],
        run: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Rehearse a call; if it is like one before, put an operator in its place."""

        def rehearsed() -> Any:
            call.steps.prepare()
            with call.steps:
                returned = enter(run, args, kwargs)
            call.end(returned)
            return returned

        try:
            with self._noting(call.steps):
                returned = self._aside(rehearsed)
        except Exception as e:
            raise self.fail(f"a call cannot be rehearsed: {e}", call.number) from e
        for other in alike:
            if call.is_like(other):
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
        """What `call` returned, with results that are those of operators of ours."""
        kinds = [like.kind(t) for t in like.results]
        sizes: dict[str, int] = {}
        made: dict[int, Tensor] = {}
        for grad in (True, False):  # an operator gives all of its results a gradient, or none
            group = [i for i, kind in enumerate(kinds) if kind.requires_grad is grad]
            if group:
                key = f"{call.number}/{len(sizes)}"
                self.expected[key] = [kinds[i] for i in group]
                given = [results[i] for i in group] if results else []
                found = REPEATED([] if sizes else operands, given, key)
                made.update(zip(group, found, strict=True))
                sizes[key] = len(group)
        if self._aside(lambda: [kind_of(made[i]) for i in range(len(kinds))]) != kinds:
            raise self.fail("results cannot be put in their place", call.number)
        self.placed[call.number] = Placed(like.number, sizes, start)
        new = {id(t): made[i] for i, t in enumerate(call.results)}
        return exchanged(returned, lambda t: new.get(id(t), call.steps.original(t)))

    @contextmanager
    def _noting(self, steps: Steps) -> Iterator[None]:
        self._running = steps
        try:
            yield
        finally:
            self._running = None

    def _aside(self, work: Callable[[], Any]) -> Any:
        """Do `work` where no trace sees it: modes belong to threads."""
        context, grad = contextvars.copy_context(), torch.is_grad_enabled()

        def alone() -> Any:
            with torch.set_grad_enabled(grad):
                return context.run(work)

        return self._thread.submit(alone).result()
