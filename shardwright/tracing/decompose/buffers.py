"""Turns assignments to buffers in a traced call into updates, or raises with the user's line.

A graph has the buffers that the model has before the call, each of a fixed shape and dtype. Any
other change of buffers could not be repeated in the next step, or on tiles.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from shardwright.tracing.call import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])  # the package `tracing`

DtypeShape = tuple[torch.dtype, tuple[int, ...]]


def users_frame(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame of code outside of torch and of this package; None if there is none."""
    frames = [f for f in stack if is_users(f.filename)]
    return frames[-1] if frames else None


def is_users(filename: str) -> bool:
    """Whether `filename` is a file, and belongs neither to torch nor to `shardwright.tracing`."""
    return not filename.startswith((_TORCH, _OURS, "<"))


@contextmanager
def buffer_guard(model: nn.Module) -> Iterator[None]:
    """A context in which assignments to buffers that no graph can express raise `CaptureError`."""
    paths = {id(module): path for path, module in model.named_modules()}
    kinds = {
        name: _dtype_and_shape(buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }

    def check(module: nn.Module, name: str, value: torch.Tensor | None) -> None:
        if id(module) not in paths:
            return
        full = f"{paths[id(module)]}.{name}".lstrip(".")
        frame = users_frame(traceback.extract_stack())
        where = f"{frame.filename}:{frame.lineno}" if frame else type(module).__name__
        if full not in kinds:
            raise CaptureError(
                f"{where}: the model registers its buffer {full} while it runs, so its first step"
                " is not like the others; register it in __init__"
            )
        if value is None:
            raise CaptureError(f"{where}: the model drops its buffer {full}; keep it a tensor")
        _require(where, full, kinds[full], _dtype_and_shape(value))

    hook = register_module_buffer_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


def dtypes_and_shapes(buffers: Mapping[str, torch.Tensor]) -> dict[str, DtypeShape]:
    """Dtype and shape of each buffer."""
    return {name: _dtype_and_shape(buffer) for name, buffer in buffers.items()}


def update_in_place(
    model: nn.Module, before: Mapping[str, torch.Tensor], kinds: Mapping[str, DtypeShape]
) -> None:
    """Turn assignments to buffers of `model` into in-place updates, which export records.

    `before` has the buffers before the call, by path, and `kinds` their dtypes and shapes then.
    Raises `CaptureError` if the call removed a buffer or changed its dtype or shape.
    """
    after = dict(model.named_buffers())
    for name, old in before.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        new = after.get(name)
        if new is None:
            raise CaptureError(
                f"{_forward_of(module)}: the model drops its buffer {name}; keep it a tensor"
            )
        if kinds[name] != _dtype_and_shape(new):
            _require(_forward_of(module), name, kinds[name], _dtype_and_shape(new))
        if old is not new:
            old.copy_(new.detach())
            setattr(module, last, old)


def _require(where: str, name: str, old: DtypeShape, new: DtypeShape) -> None:
    if old != new:
        raise CaptureError(
            f"{where}: the model makes its buffer {name}, {old[0]} of {old[1]}, one of {new[0]}"
            f" and {new[1]}; keep its shape and dtype"
        )


def _dtype_and_shape(tensor: torch.Tensor) -> DtypeShape:
    return tensor.dtype, tuple(tensor.shape)


def _forward_of(module: nn.Module) -> str:
    """File and line of the module's forward; its class where that has no file."""
    forward = type(module).forward
    try:
        file = inspect.getsourcefile(forward)
        return f"{file}:{inspect.getsourcelines(forward)[1]}"
    except (OSError, TypeError):
        return type(module).__name__
