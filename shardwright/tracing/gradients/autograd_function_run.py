"""Runs one call of an autograd function to find its results and side effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from shardwright.tracing.torch_private import TorchDispatchMode, version_of
from shardwright.tracing.trees import join_tensors, split_tensors

_MOST_ELEMENTS = 2**26  # of tensors that are filled with random numbers


class UnfitError(Exception):
    """A call that cannot become one operator; `keep`: its module can be kept whole instead."""

    def __init__(self, message: str, *, keep: bool = False) -> None:
        super().__init__(message)
        self.keep = keep


class FunctionTensor(NamedTuple):
    """Metadata of a tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, t: Tensor) -> FunctionTensor:
        """The metadata of a tensor."""
        return cls(tuple(t.shape), t.stride(), t.dtype, t.device.type, t.requires_grad)


FunctionFacts = tuple[Any, tuple[FunctionTensor, ...], bool]


def probe_function(call: Any, kinds: Sequence[FunctionTensor]) -> FunctionFacts:
    """The structure of the result of `call`, its tensors, and whether meta tensors sufficed.

    Raises `UnfitError` for a call that has side effects or cannot be run.
    """
    before = _state(call)
    try:
        found = (*_run(call, kinds, _meta), True)
    except UnfitError:
        raise
    except Exception as e:  # its code may need values for anything
        found = (*_on_numbers(call, kinds, e), False)
    if _state(call) != before:
        raise UnfitError(
            "changes attributes of its class while it runs, which the next step would find; keep"
            " state in buffers of a module"
        )
    return found


def _on_numbers(
    call: Any, kinds: Sequence[FunctionTensor], error: Exception
) -> tuple[Any, tuple[FunctionTensor, ...]]:
    """Probe a call with two samples of random numbers, after the meta device raised `error`."""
    if sum(prod(k.shape) for k in kinds) > _MOST_ELEMENTS:
        raise UnfitError(
            f"looks at values of its tensors ({_line(error)}), which are too large to try it"
            " on; use operators that run on meta tensors"
        ) from error
    try:
        one, other = (_run(call, kinds, _drawn(sign)) for sign in (1, -1))
    except UnfitError:
        raise
    except Exception as e:
        raise UnfitError(
            f"cannot be run on random numbers: {_line(e)}; make it run on tensors of any values",
            keep=True,
        ) from e
    if one[1] != other[1]:
        shapes = [[k.shape for k in found[1]] for found in (one, other)]
        raise UnfitError(
            f"returns tensors of shapes {shapes[0]} or of {shapes[1]}, depending on the data;"
            " return the same shapes whatever the data"
        )
    return one


def _run(
    call: Any, kinds: Sequence[FunctionTensor], make: Callable[[FunctionTensor], Tensor]
) -> tuple[Any, tuple[FunctionTensor, ...]]:
    """Run the forward and the backward pass on tensors that `make` creates."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        leaves = [make(k).requires_grad_(k.requires_grad) for k in kinds]
        given = [leaf.clone() for leaf in leaves]
        versions = [version_of(t) for t in given]
        values = [t.detach().clone() for t in given]
        with _ScopeGuard(given) as sight:
            structure, found = split_tensors(
                call.function.apply(*join_tensors(call.arguments, given))
            )
        changed = any(version_of(t) != v for t, v in zip(given, versions, strict=True)) or any(
            not t.is_meta and not torch.equal(t.detach().nan_to_num(), v.nan_to_num())
            for t, v in zip(given, values, strict=True)
        )
        if changed:
            raise UnfitError(
                "changes a tensor that it is given in place (mark_dirty); return a new tensor"
            )
        outputs = [t for t in found if t.requires_grad]
        gradients = [torch.ones_like(t) for t in outputs]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if outputs and wanted:
            with sight.extended(gradients):
                torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
    return structure, tuple(FunctionTensor.of(t) for t in found)


def _meta(kind: FunctionTensor) -> Tensor:
    return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device="meta")


def _drawn(sign: int) -> Callable[[FunctionTensor], Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0)

    def make(kind: FunctionTensor) -> Tensor:
        device = "cpu" if kind.device == "meta" else kind.device
        if kind.dtype.is_floating_point or kind.dtype.is_complex:
            drawn = sign * torch.randn(kind.shape, generator=generator, device="cpu")
        else:
            drawn = torch.zeros(kind.shape, device="cpu")
        return drawn.to(device, kind.dtype)

    return make


def _state(call: Any) -> dict[str, str]:
    """Attributes of the class, and of objects among the arguments, as text."""
    found = {key: repr(value) for key, value in vars(call.function).items() if key[:2] != "__"}
    for i, argument in enumerate(call.arguments):
        attributes = getattr(argument, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(argument, type):
            found.update((f"{i}.{key}", repr(value)) for key, value in attributes.items())
    return found


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@final
class _ScopeGuard(TorchDispatchMode):
    """Rejects random numbers, and operators on tensors that are neither arguments nor made here."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept: list[Any] = []  # the storages themselves, so that their ids stay unique
        self._known: set[int] = set()
        self.extended(given)

    def extended(self, tensors: Sequence[Tensor]) -> _ScopeGuard:
        """Add tensors to the known ones."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._kept.append(storage)
            self._known.add(id(storage))
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_quiet(func, args, kwargs):
            raise UnfitError(
                f"draws random numbers ({func}), which ranks could not agree on; draw them outside"
                " with torch.rand and pass them to apply",
                keep=True,
            )
        unknown = []
        for tensor in split_tensors((args, kwargs))[1]:
            if id(tensor.untyped_storage()) in self._known:
                continue
            unknown.append((tensor, version_of(tensor)))
            if tensor.requires_grad or type(tensor) is not Tensor:
                raise UnfitError(
                    f"reads a tensor of shape {tuple(tensor.shape)} that is not among the arguments"
                    " of apply, so no plan could give it its part; pass it to apply"
                )
        found = func(*args, **kwargs)
        for tensor, version in unknown:
            if version_of(tensor) != version:
                raise UnfitError(
                    f"changes a tensor of shape {tuple(tensor.shape)} that it did not make; return"
                    " it instead"
                )
        self.extended(split_tensors(found)[1])
        return found


def _is_quiet(func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether a call of an operator that can draw random numbers draws none."""
    name = str(func)
    if "dropout" in name:
        return len(args) > 1 and args[1] == 0
    return "attention" in name and not any(isinstance(a, float) and a > 0 for a in args[3:5])
