"""Answers a model's code that asks whether it is being compiled.

While `torch.export` traces a model, `torch.compiler.is_compiling()` is True. Models take other ways
then, e.g. they leave out a mask, or checks of values, and some of these ways fail. A model that is
called takes none of them. So where tracing fails after such a question, it is repeated with the
answers of a plain call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

import torch

from shardwright.tracing.export.patches import Patches
from shardwright.tracing.torch_private import note_torch_functions

_TORCHS = {
    "is_compiling": torch.compiler.is_compiling,
    "is_exporting": torch.compiler.is_exporting,
    "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
}
_FRAME = 1  # of the caller of an answer


@final
@dataclass
class CompilerQuestions:
    """Notes whether code outside of torch asks for the compiler, and how it is answered.

    Attributes:
        as_called: whether the answer is no, as in a plain call; else torch answers.
        asked: whether anyone asked.
    """

    as_called: bool
    asked: bool = False

    @contextmanager
    def answered(self) -> Iterator[None]:
        """A context in which questions of this thread are noted and answered."""
        token = _current.set(self)
        try:
            with _patches.applied(_apply):
                yield
        finally:
            _current.reset(token)


_current: ContextVar[CompilerQuestions | None] = ContextVar("compiler_questions", default=None)
_patches = Patches()


@contextmanager
def answered_by_torch() -> Iterator[None]:
    """A context for torch's compiler, which knows torch's own functions by their identity."""
    now = {name: getattr(torch.compiler, name) for name in _TORCHS}
    _set(_TORCHS)
    try:
        yield
    finally:
        _set(now)


def _apply() -> Callable[[], None]:
    note_torch_functions()
    _set({name: _answering(ask) for name, ask in _TORCHS.items()})
    return lambda: _set(_TORCHS)


def _set(functions: Mapping[str, Callable[[], bool]]) -> None:
    for name, function in functions.items():
        setattr(torch.compiler, name, function)


def _answering(ask: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        questions = _current.get()
        module = str(sys._getframe(_FRAME).f_globals.get("__name__", ""))
        if questions is None or module.partition(".")[0] == "torch":
            return ask()
        questions.asked = True
        return not questions.as_called and ask()

    return answer
