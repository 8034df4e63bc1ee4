"""Checks that a second call of a model computes the same, if a call changed Python state.

A graph represents one call. A model that counts its calls, keeps an average in an attribute or
appends to a list may compute something different in each call; it is rejected with an error that
names the line. A cache that the second call leaves unchanged, or an attribute that is written
before it is read, is accepted.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.buffers import is_users
from shardwright.tracing.dedup.block_call import tensors_in
from shardwright.tracing.dedup.module_steps import writes
from shardwright.tracing.python_state import Snapshot, StateLocation

_DRAWN = frozenset(
    (
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like",
        "normal", "normal_", "uniform_", "bernoulli", "bernoulli_", "multinomial", "dropout",
        "exponential_", "random_", "poisson", "log_normal_", "geometric_", "cauchy_",
    )
)  # fmt: skip
_OF_SHAPE_ALONE = frozenset(
    (
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
        "new_empty", "new_tensor", "size", "dim", "stride", "numel", "type", "is_floating_point",
    )
)  # fmt: skip

_STDLIB = str(Path(contextlib.__file__).parent)  # packages may be installed below it


class ModelTrial(NamedTuple):
    """A copy of a model, one call of it, and the tensors whose values differ between calls."""

    model: nn.Module
    run: Callable[[], Any]
    data: Sequence[Tensor]


def check_state(
    changed: Sequence[StateLocation],
    trials: Sequence[Callable[[], ModelTrial]],
    name: str,
    named: Collection[StateLocation] = (),
) -> None:
    """Raise `CaptureError` unless two calls in a row compute the same from equal inputs.

    `changed` are locations that a call changed. `trials` make copies to call; the first that can be
    called is used. `name` is the model's name in messages. Where none can be called, e.g. on the
    meta device, locations in `named` are accepted: a mode that changed from None to a text, as
    Hugging Face's `problem_type`, is chosen once.
    """
    for make in trials:
        try:
            trial = make()
            with _side_effects_hidden():
                location = _differs(trial, changed)
        except Exception:  # it cannot be called in this way, e.g. on the meta device
            continue
        if location is not None:
            raise _error(location, trials, name)
        return
    if left := [location for location in changed if location not in named]:
        raise _error(left[0], trials, name)


def _differs(trial: ModelTrial, changed: Sequence[StateLocation]) -> StateLocation | None:
    """A location whose value changes the second call; None if both calls are equal."""
    first = Snapshot(trial.model)
    one = _call(trial, ())
    second = Snapshot(trial.model)
    carried = {
        key: (location, tensor)
        for key, (location, tensor) in second.tensors.items()
        if key not in first.tensors or first.leaves.get(location) != second.leaves.get(location)
    }
    two = _call(trial, [t for key, (_, t) in carried.items() if key in one.tainted])
    third = Snapshot(trial.model)
    locations = second.plain_changes(third)
    if locations:
        return locations[0]
    for key, (location, _) in carried.items():
        kept = second.leaves.get(location) == third.leaves.get(location)
        if key in two.read and (key in one.tainted or not kept):
            return location
    if one.steps != two.steps:
        return next(iter((*first.changes(second), *changed)), StateLocation("", "what it keeps"))
    return None


def _call(trial: ModelTrial, more: Sequence[Tensor]) -> _Calls:
    calls = _Calls([*trial.data, *more])
    with calls:
        trial.run()
    return calls


@final
class _Calls(TorchFunctionMode):
    """Records functions of torch that read data, or values computed from data.

    `tainted` has the identities of those values. `read` has those of all tensors whose values any
    function reads. `steps` has the calls that read tainted values or draw random numbers.
    """

    def __init__(self, data: Sequence[Tensor]) -> None:
        super().__init__()
        self.tainted = {id(t) for t in data}
        self.read: set[int] = set()
        self.steps: list[Any] = []
        self._kept: list[Any] = []  # so that no other gets the same identity

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        result = func(*args, **kwargs)
        if name == "__get__" and not isinstance(result, Tensor):
            return result
        given = list(tensors_in((args, tuple(kwargs.values()))))
        made = list(tensors_in(result))
        self._kept += [*given, *made]
        if name not in _OF_SHAPE_ALONE:
            self.read.update(map(id, given))
        tainted = name in _DRAWN or (
            name not in _OF_SHAPE_ALONE and any(id(t) in self.tainted for t in given)
        )
        if tainted:
            self.steps.append((name, self._comparable(args), self._comparable(kwargs)))
            self.tainted.update(map(id, made))
            if writes(name, kwargs) and given:
                self.tainted.add(id(given[0]))
        return result

    def _comparable(self, value: Any) -> Any:
        """A description of a value, equal for equal arguments of two calls."""
        if isinstance(value, Tensor):
            return tuple(value.shape), str(value.dtype), id(value) in self.tainted
        if isinstance(value, tuple | list):
            return tuple(self._comparable(part) for part in value)
        if isinstance(value, Mapping):
            return tuple((str(key), self._comparable(part)) for key, part in value.items())
        if value is None or isinstance(value, bool | int | float | complex | str):
            return type(value).__name__, repr(value)
        return type(value).__name__


def _error(
    location: StateLocation, trials: Sequence[Callable[[], ModelTrial]], name: str
) -> CaptureError:
    """The error on a value that a call changes, with the line that does, if a trial shows it."""
    at = ""
    for make in trials:
        with contextlib.suppress(Exception), _side_effects_hidden():
            trial = make()
            at = at or _line(trial, location)
    return CaptureError(
        f"{at or 'an unknown line'}: {name} changes {location} while it runs, which is Python"
        " state, so its next call computes something else and a graph has the value of one call;"
        " make it a buffer (register_buffer, changed in place), draw random numbers with"
        " torch.rand, or take it out of forward",
        refused=True,
    )


def _line(trial: ModelTrial, location: StateLocation) -> str:
    """File and line of the user's code that changes the value at `location`; empty if unknown."""
    before, last, answer = Snapshot.of(trial.model, location), "", ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal last, answer
        file = frame.f_code.co_filename
        own = file.startswith(_STDLIB) and "site-packages" not in file
        if answer or own or not is_users(file):
            return None
        if last and Snapshot.of(trial.model, location) != before:
            answer = last
            return None
        last = f"{file}:{frame.f_lineno}"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        trial.run()
    except Exception:  # it changed before this line, or not at all
        pass
    finally:
        sys.settrace(outer)
    return answer or (last if Snapshot.of(trial.model, location) != before else "")


@contextlib.contextmanager
def _side_effects_hidden() -> Iterator[None]:
    """A context that restores torch's CPU generator and suppresses what a model prints."""
    with (
        torch.random.fork_rng(devices=[]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield
