"""`torch.export` of one call, with the errors a user can act on."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from shardwright.capture import decompose
from shardwright.capture.call import CaptureError, select_outputs, unflatten

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


class Returned:
    """Names of what a model returned."""

    keys: tuple[str, ...] = ()


class FlatCall(nn.Module):
    """The model as a function of its flat tensor arguments.

    After a call, `returned.keys` names the outputs. It lives in an object of
    its own because export undoes what a forward assigns to its module.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, torch.Tensor], constants: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # and not the True that a new module starts with
        self.paths = tuple(tensors)
        self.order = (*tensors, *constants)
        self.constants = dict(constants)
        self.returned = Returned()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = unflatten({**self.constants, **dict(zip(self.paths, tensors, strict=True))})
        self.returned.keys, outputs = select_outputs(self.model(*args, **kwargs))
        return tuple(outputs)


def export(call: FlatCall, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """The call as one functional graph of ATen operators; nothing is computed."""
    first = next(call.model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    # Fresh tensors: two arguments that are one tensor would become one input.
    example = tuple(torch.empty_like(t, device=device) for t in tensors.values())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(call, example, strict=False)
            functional: ExportedProgram = program.run_decompositions(decompose.table())
            return functional
    except CaptureError:
        raise
    except Exception as e:
        raise CaptureError(_explain(call.model, e)) from e


def _explain(model: nn.Module, error: Exception) -> str:
    """One line: what failed, in which line of the user's code, what to do."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_TORCH, _OURS, "<"))
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error).lower():
        return (
            f"{type(model).__name__} cannot be captured: {where} decides on the value of a tensor"
            f" ({reason[0]}); express it with torch.where, or take the decision outside the model"
        )
    return f"{type(model).__name__} cannot be captured: {where}: {kind}: {reason[0]}"
