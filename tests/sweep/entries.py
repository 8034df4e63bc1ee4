"""Small modules of every operator and module that PyTorch tests itself.

PyTorch's databases of operators and modules are private. Nothing else here imports them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

DTYPES = (torch.float64, torch.int64, torch.bool)  # the first that an operator takes
SAMPLES = 2  # of each operator and dtype
_MOST_ELEMENTS = 4096
_UNSTABLE = (  # what they return is not a function of their arguments
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
)


@dataclass(frozen=True)
class Entry:
    """A form of an operator or module; `make` gives modules, each with the tensors of a call."""

    name: str
    make: Callable[[], Iterator[tuple[nn.Module, tuple[torch.Tensor, ...]]]]


class OfOperator(nn.Module):
    """A weighted sum of what an operator gives for its tensors, the first `scaled` of which are
    multiplied by a parameter of ones each, whose gradient tells that of the tensor.
    """

    def __init__(
        self, call: Callable[..., Any], arguments: Any, scaled: int, *, inplace: bool = False
    ) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten(arguments)
        self.call, self.inplace = call, inplace
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in self.at]
        numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        self.scales = nn.ParameterList(
            nn.Parameter(torch.ones(t.shape, dtype=t.dtype)) for t in numbers[:scaled]
        )
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves, scales = list(self.leaves), iter(self.scales)
        for i, tensor in zip(self.at, tensors, strict=True):
            number = tensor.is_floating_point() or tensor.is_complex()
            scale = next(scales, None) if number else None
            leaves[i] = tensor if scale is None else tensor * scale
        args, kwargs = tree_unflatten(leaves, self.spec)
        if self.inplace:
            args = (args[0].clone(), *args[1:])
        return weighted(self.call(*args, **kwargs), self.weight)


class OfModule(nn.Module):
    """A weighted sum of what a module gives for its tensors."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten(arguments)
        self.module = module
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return weighted(self.module(*args, **kwargs), self.weight)


def weighted(returned: Any, weight: torch.Tensor) -> torch.Tensor:
    """The sum of all elements of all tensors, each times a number of its own, times `weight`."""
    total = torch.zeros((), dtype=torch.float64)
    for out in tree_flatten(returned)[0]:
        if not isinstance(out, torch.Tensor):
            continue
        if out.is_complex():
            out = torch.view_as_real(out.resolve_conj())
        out = out.to(torch.float64)
        ramp = torch.arange(1, out.numel() + 1, dtype=torch.float64).reshape(out.shape)
        total = total + (out * (ramp / max(1, out.numel()))).sum()
    return total * weight


def entries() -> list[Entry]:
    """Every entry of both databases, in its forms."""
    found = []
    for info in op_db:
        if info.name in _UNSTABLE:
            continue
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        found.append(Entry(name, _of_operator(info, inplace=False)))
        if info.inplace_variant is not None:
            found.append(Entry(f"{name} (in place)", _of_operator(info, inplace=True)))
    for info in module_db:
        for training in (True, False):
            mode = "training" if training else "evaluation"
            found.append(Entry(f"{info.name} ({mode})", _of_module(info, training)))
    return found


def _of_operator(info: Any, *, inplace: bool) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[tuple[nn.Module, tuple[torch.Tensor, ...]]]:
        supported = info.supported_dtypes("cpu")
        dtypes = [next((d for d in DTYPES if d in supported), None)]
        dtypes += [torch.complex128] if torch.complex128 in supported else []
        for dtype in dtypes:
            if dtype is None:
                continue
            torch.manual_seed(0)
            taken: set[Any] = set()
            for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
                arguments = ((sample.input, *sample.args), dict(sample.kwargs))
                leaves = tree_flatten(arguments)[0]
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                kind = tuple(
                    leaf.dim() if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in leaves
                )
                if kind in taken or not _is_small(tensors) or len(taken) >= SAMPLES:
                    continue
                call = info.inplace_variant if inplace else info.op
                for scaled in (len(tensors), 1, 0):  # as many as torch has derivatives for
                    module = OfOperator(call, arguments, scaled, inplace=inplace)
                    if _runs(module, tensors):
                        taken.add(kind)
                        yield module, _copies(tensors)
                        break

    return make


def _of_module(info: Any, training: bool) -> Callable[[], Iterator[Any]]:
    def make() -> Iterator[tuple[nn.Module, tuple[torch.Tensor, ...]]]:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
            )
        for sample in inputs[:SAMPLES]:
            made, given = sample.constructor_input, sample.forward_input
            if given is None:
                continue
            module = info.module_cls(*made.args, **made.kwargs).to(torch.float64).train(training)
            arguments = (tuple(given.args), dict(given.kwargs))
            leaves = tree_flatten(arguments)[0]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if _is_small(tensors) and _runs(copy.deepcopy(OfModule(module, arguments)), tensors):
                yield OfModule(module, arguments).train(training), _copies(tensors)

    return make


def _runs(module: nn.Module, tensors: list[torch.Tensor]) -> bool:
    """Whether torch itself can run the module forward and backward, with derivatives to compare."""
    try:
        module(*_copies(tensors)).backward()
    except Exception:  # a sample that is not for this form, or that has no derivative
        return False
    scales = list(getattr(module, "scales", ()))
    told = any(p.grad is not None and p.grad.any() for p in scales)
    module.zero_grad()
    return told or not scales


def _is_small(tensors: list[torch.Tensor]) -> bool:
    return all(t.numel() <= _MOST_ELEMENTS and t.layout is torch.strided for t in tensors)


def _copies(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach().clone() for t in tensors)
