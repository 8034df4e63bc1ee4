"""Keeps each sub-module that export cannot trace as one operator, which runs the module itself.

The operands are the sub-module's parameters and buffers, which remain parameters and buffers of the
model, and the tensors that it is called with. The results are the tensors that it returns and the
new values of the buffers that it changes. Their shapes are found by running the module, so it must
have weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardwright.tracing.call import CaptureError
from shardwright.tracing.gradients.gradient_guard import GradientGuard
from shardwright.tracing.gradients.hooks import hooks_removed, with_hooks
from shardwright.tracing.patched_forward import replaced_forward
from shardwright.tracing.python_state import Snapshot
from shardwright.tracing.state_check import ModelTrial, check_state
from shardwright.tracing.trees import join_tensors, split_tensors

_calls: ContextVar[Mapping[str, OpaqueCall]] = ContextVar("opaque calls being captured")


class WeightsNeededError(CaptureError):
    """A model on the meta device that can be captured only with weights."""


@torch.library.custom_op("shardwright::opaque", mutates_args=())
def opaque(tensors: Sequence[Tensor], key: str, kind: str) -> list[Tensor]:
    """A placeholder in exported programs; a program on ranks runs the sub-module itself."""
    raise AssertionError(f"{key} is run by the module of its call")


@opaque.register_fake
def _(tensors: Sequence[Tensor], key: str, kind: str) -> list[Tensor]:
    results = _calls.get()[key].results
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in results]


@dataclass
class OpaqueCall:
    """One form of call of one sub-module that is kept whole.

    Attributes:
        path: the module's path in the model.
        module: a copy of it without weights.
        names: the names of its own tensors that it is given.
        buffers: the buffers that may change.
        arguments: the arguments, with slots for tensors.
        returned: what it returns, with slots for tensors.
        changed: the buffers that do change.
        results: shape and dtype of each tensor that it gives: those that it returns, and then the
            changed buffers.
    """

    path: str
    module: nn.Module
    names: tuple[str, ...]
    buffers: frozenset[str]
    arguments: Any
    returned: Any = None
    changed: tuple[str, ...] = ()
    results: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    def classes(self) -> Iterator[type]:
        """The classes that a process must import to run it."""
        return map(type, self.module.modules())

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results for the module's own tensors, by `names`, followed by the call's tensors.

        Raises `ValueError` for results of other shapes than at capture, for other numbers beside
        them, and for a change of a buffer that kept its value in every sample of `observe`.
        """
        around, found, state = self._run(tensors)
        if (numbers := _numbers_in(around)) != (known := _numbers_in(self.returned)):
            raise ValueError(
                f"{self.path} returned {numbers} beside its tensors for this batch, and {known}"
                " when it was captured; return tensors of what depends on the data"
            )
        for name, before in zip(self.names, tensors, strict=False):
            kept = name in self.buffers and name not in self.changed
            if kept and not _equal_with_nan(before, state[name]):
                raise ValueError(
                    f"{self.path} changed its buffer {name} for this batch, and did not when it was"
                    " captured; change the same buffers whatever the data"
                )
        results = [*found, *(state[name] for name in self.changed)]
        shapes = [tuple(result.shape) for result in results]
        expected = [tuple(shape) for shape, _ in self.results]
        if shapes != expected:
            raise ValueError(
                f"{self.path} returned tensors of shapes {shapes} for this batch, and of {expected}"
                " when it was captured; return the same shapes whatever the data"
            )
        return results

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor], dict[str, Tensor]]:
        own, given = tensors[: len(self.names)], tensors[len(self.names) :]
        pairs = zip(self.names, own, strict=True)
        state = {name: t.clone() if name in self.buffers else t for name, t in pairs}
        args, kwargs = join_tensors(self.arguments, given)
        with _unpatched(self.module):
            returned = functional_call(self.module, state, args, kwargs)
        return (*split_tensors(returned), state)

    def observe(self, own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Find the results by running it on random numbers in place of `given`, which are fake.

        Changed buffers are found by comparing values, because `F.batch_norm` and `.data` do not
        change a tensor's version. A buffer that keeps its value in one sample may change in
        another. Gradients are enabled, as in training, because the module may have hooks on its
        tensors.
        """
        shapes: list[list[tuple[torch.Size, torch.dtype]]] = []
        numbers: list[list[Any]] = []
        changed: set[str] = set()
        around, state = None, dict(zip(self.names, own, strict=True))
        for sign in (1, -1):
            generator = torch.Generator(device="cpu").manual_seed(0)
            sample = [sample_like(t, generator, own, sign) for t in given]
            alone = replace(self, module=_copy(self.module))
            state_before = Snapshot(alone.module)
            kept, args = _recorded(own, own), [t.clone() for t in _recorded(sample, given)]
            guard = GradientGuard(
                alone.module, dict(zip(self.names, kept, strict=True)), tuple(args), self.path
            )
            with guard, torch.random.fork_rng(devices=[]):
                around, found, state = alone._run([*kept, *args])
            if python_state := state_before.changes(Snapshot(alone.module)):
                check_state(python_state, (partial(self._trial, own, sample, given),), self.path)
            self._refuse_changes(zip(self.names, own, kept, strict=True), sample, args)
            before = dict(zip(self.names, own, strict=True))
            changed |= {n for n in self.buffers if not _equal_with_nan(before[n], state[n])}
            shapes.append([(t.shape, t.dtype) for t in found])
            numbers.append(_numbers_in(around))
        if numbers[0] != numbers[1]:
            raise CaptureError(
                f"{self.path} returns {numbers[0]} or {numbers[1]} beside its tensors, depending on"
                " the data; return tensors of what depends on the data",
                self.path,
            )
        if shapes[0] != shapes[1]:
            one, other = ([tuple(shape) for shape, _ in results] for results in shapes)
            raise CaptureError(
                f"{self.path} returns tensors of shapes {one} or of {other}, depending on the data;"
                " return the same shapes whatever the data",
                self.path,
            )
        self.changed = tuple(name for name in self.names if name in changed)
        buffers = [(state[name].shape, state[name].dtype) for name in self.changed]
        self.returned, self.results = around, (*shapes[0], *buffers)

    def _trial(self, own: Sequence[Tensor], sample: Sequence[Tensor], given: Any) -> ModelTrial:
        """A copy of the module to call with a sample; the module itself if it cannot be copied."""
        alone = replace(self, module=_copy(self.module))
        kept = _recorded(own, own)

        def run() -> Any:
            return alone._run([*kept, *args])

        args = [t.clone() for t in _recorded(sample, given)]
        return ModelTrial(alone.module, run, [*kept, *args])

    def _refuse_changes(
        self,
        own: Iterable[tuple[str, Tensor, Tensor]],
        sample: Sequence[Tensor],
        args: Sequence[Tensor],
    ) -> None:
        """Raise `CaptureError` for in-place changes that a graph's operator cannot have."""
        for (
            name,
            before,
            after,
        ) in own:  # buffers are passed as copies, so the originals are unchanged
            if not _equal_with_nan(before, after):
                raise CaptureError(
                    f"{self.path} changes its parameter {name} in place while it runs; change it"
                    " after the step, or make it a buffer (register_buffer)",
                    self.path,
                )
        if not all(map(_equal_with_nan, sample, args)):
            raise CaptureError(
                f"{self.path} changes a tensor that it is called with in place; let it work on a"
                " copy (x = x.clone())",
                self.path,
            )


def _numbers_in(structure: Any) -> list[Any]:
    """The numbers in the structure of a module's results."""
    if isinstance(structure, Mapping):
        return [part for item in structure.values() for part in _numbers_in(item)]
    if isinstance(structure, tuple | list):
        return [part for item in structure for part in _numbers_in(item)]
    return [structure] if isinstance(structure, int | float) else []


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception:  # whatever it holds
        return module


def _recorded(values: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Copies of `values` that require gradients where those of `like` do."""
    pairs = zip(values, like, strict=True)
    return [value.detach().clone().requires_grad_(t.requires_grad) for value, t in pairs]


@contextmanager
def _unpatched(module: nn.Module) -> Iterator[None]:
    """A context in which `module` has its own forward and hooks, also during its capture."""
    replaced = module.__dict__.pop("forward", None)
    try:
        if isinstance(hooks := getattr(replaced, "hooks", None), dict):
            with with_hooks(module, hooks):
                yield
        else:
            if replaced is not None:
                module.__dict__["forward"] = replaced
            yield
    finally:
        if replaced is not None:
            module.__dict__["forward"] = replaced


def _equal_with_nan(before: Tensor, after: Tensor) -> bool:
    """Equal in shape, type and every value, NaN included."""
    if before is after:
        return True
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    both_nan = (before != before) & (after != after)
    return bool(((before == after) | both_nan).all())


def sample_like(
    like: Any, generator: torch.Generator, own: Sequence[Tensor] = (), sign: int = 1
) -> Tensor:
    """Numbers around zero; zeros for integers, which may be indices."""
    device = own[0].device if own else torch.device("cpu")
    if like.dtype.is_floating_point:
        drawn = torch.randn(tuple(like.shape), generator=generator, device="cpu")
        return (sign * drawn).to(device, like.dtype)
    return torch.zeros(tuple(like.shape), dtype=like.dtype, device=device)


@dataclass
class OpaqueModules:
    """The sub-modules of a model that are kept whole, and the calls of them that were recorded."""

    model: nn.Module
    reasons: dict[str, str] = field(default_factory=dict)  # by path
    calls: dict[str, OpaqueCall] = field(default_factory=dict)

    def add(self, path: str, reason: str) -> None:
        """Keep the module at `path` whole, with all modules inside.

        If another module of its class is kept whole already, all modules of the class are. Raises
        `WeightsNeededError` if a parameter or buffer is on the meta device.
        """
        module = self.model.get_submodule(path)
        tensors = [*module.parameters(), *module.buffers()]
        if any(t.is_meta for t in tensors):
            raise WeightsNeededError(
                f"{reason}. {path} could be kept whole instead, but it is on the meta device, and"
                " only running it tells what it returns; build the model with weights"
            )
        for inside in [p for p in self.reasons if p.startswith(f"{path}.")]:
            del self.reasons[inside]
        self.reasons[path] = reason
        same_class = [
            p for p, m in self.model.named_modules() if type(m) is type(module) and p != path
        ]
        if any(p in self.reasons for p in same_class):  # a second module of one class
            self.reasons.update((p, reason) for p in same_class if p and p not in self.reasons)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """A context in which each of these modules is one operator."""
        self.calls = {}
        token = _calls.set(self.calls)
        with ExitStack() as stack:
            stack.callback(_calls.reset, token)
            for path in self.reasons:
                stack.enter_context(self._replaced(path))
            yield

    @contextmanager
    def _replaced(self, path: str) -> Iterator[None]:
        """A context in which a call of the module at `path` becomes one operator."""
        module = self.model.get_submodule(path)
        names = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        real = [t.detach().requires_grad_(t.requires_grad) for t in names.values()]
        buffers = frozenset(name for name, _ in module.named_buffers())
        copied = without_weights(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments, given = split_tensors((args, kwargs))
            call = OpaqueCall(path, copied, tuple(names), buffers, arguments)
            key = self._key(call, given)
            if key not in self.calls:
                # In another thread, because tensors of this one are fake.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(call.observe, real, given).result()
                self.calls[key] = call
            call = self.calls[key]
            now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            results = opaque([*now.values(), *given], key, type(module).__name__)
            count = len(results) - len(call.changed)
            for name, value in zip(call.changed, results[count:], strict=True):
                module.get_buffer(name).copy_(value)
            return join_tensors(call.returned, results[:count])

        with hooks_removed(module) as hooks, replaced_forward(module, forward):
            forward.hooks = hooks  # type: ignore[attr-defined]  # for a module without copies
            yield

    def _key(self, call: OpaqueCall, given: Sequence[Tensor]) -> str:
        """A name of the call, equal for calls that differ only in the values of tensors."""
        form = repr((call.arguments, [(tuple(t.shape), t.dtype) for t in given]))
        forms = self.__dict__.setdefault("forms", {}).setdefault(call.path, [])
        if form not in forms:
            forms.append(form)
        number = forms.index(form)
        return f"{call.path}#{number}" if number else call.path

    def note(self) -> str:
        """One line: which modules were kept whole and why."""
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.reasons.items():
            # Without the path of the module itself, which differs between equal ones.
            text = reason.rpartition(" cannot be captured: ")[2]
            place = re.match(rf"{re.escape(path)} \(([^()]+:\d+)\)", text)
            text = f"{place[1]}{text[place.end() :]}" if place else text
            by_reason.setdefault(text, []).append(path)
        return "; ".join(
            f"{', '.join(paths)} ({type(self.model.get_submodule(paths[0])).__name__}) kept whole"
            f" and computed by every device, since {reason}"
            for reason, paths in by_reason.items()
        )


def without_weights(module: nn.Module) -> nn.Module:
    """A copy without memory for parameters and buffers; the module itself if it has no copies."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # it may hold anything, e.g. a handle of a library
        return module
