"""Makes copies of a model that can be called outside of the trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.tracing.call import unflatten
from shardwright.tracing.export.export import FlatCall
from shardwright.tracing.export.opaque import sample_like
from shardwright.tracing.export.precision import cast_input
from shardwright.tracing.gradients.gradient_guard import GradientGuard
from shardwright.tracing.python_state import Snapshot
from shardwright.tracing.state_check import ModelTrial


def call_on_meta(call: FlatCall, tensors: Mapping[str, Tensor]) -> Callable[[], ModelTrial]:
    """Return a function that copies the model to the meta device, for a call without values."""

    def make() -> ModelTrial:
        memo: dict[int, Any] = {}
        for p in call.model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        others = [t for _, t in Snapshot(call.model).tensors.values()]
        for t in (*call.model.buffers(), *others):
            memo.setdefault(id(t), torch.empty_like(t, device="meta"))
        given = {k: torch.empty_like(t, device="meta") for k, t in tensors.items()}
        return _trial(call, copy.deepcopy(call.model, memo), given, torch.device("meta"))

    return make


def call_of_copy(
    call: FlatCall, tensors: Mapping[str, Tensor], *, as_given: bool = False
) -> Callable[[], ModelTrial]:
    """Return a function that copies the model with its values, for a call on random numbers.

    With `as_given`, the call is on copies of `tensors` themselves: a model may accept no random
    numbers, e.g. one that counts the tokens that stand for image features.
    """

    def make() -> ModelTrial:
        generator = torch.Generator(device="cpu").manual_seed(0)
        own = [*call.model.parameters(), *call.model.buffers()]
        device = own[0].device if own else torch.device("cpu")
        given = {
            k: _copy_to(t, device) if as_given else sample_like(t, generator, own)
            for k, t in tensors.items()
        }
        return _trial(call, copy.deepcopy(call.model), given, device)

    return make


def call_in_trace(call: FlatCall, tensors: Mapping[str, Tensor]) -> Callable[[], ModelTrial]:
    """Return a function that copies the model to the meta device, for a call that is traced.

    A trace passes over checks of values, which a call on the meta device does not. Only changes of
    values other than tensors are found.
    """

    def make() -> ModelTrial:
        trial = call_on_meta(call, tensors)()
        given = tuple(torch.empty_like(t, device="meta") for t in tensors.values())
        again = FlatCall(trial.model, tensors, call.constants, call.numerics, call.outputs)
        again.guarded = False  # which would restore what the call changes
        if call.follows_values:
            again.follow_values(call.values)
        return ModelTrial(trial.model, lambda: torch.export.export(again, given, strict=False), [])

    return make


def _copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _trial(
    call: FlatCall, model: nn.Module, given: Mapping[str, Tensor], device: torch.device
) -> ModelTrial:
    """One more call of a model, prepared, with the tensors that it must not change."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__module__", "").startswith("shardwright."):
            del vars(module)["forward"]  # the replaced forward of an opaque module
    data = [cast_input(t, call.numerics) for t in given.values()]
    args, kwargs = unflatten({**call.constants, **dict(zip(given, data, strict=True))})
    known = dict(model.named_parameters())

    def run() -> Any:
        with device, GradientGuard(model, known, tuple(data)):
            return model(*args, **kwargs)

    return ModelTrial(model, run, [*data, *known.values()])
