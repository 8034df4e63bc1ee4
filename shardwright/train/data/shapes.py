"""Pads batches to the planned shapes, and refuses batches that fit none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.runtime.plan_transfer import Shapes, shapes_of
from shardwright.tracing.call import flatten
from shardwright.train.data.batch import Batch, Call, JobError, call_of


def fitted(batch: Batch, known: Sequence[Shapes], padding: Mapping[Any, float]) -> Batch:
    """`batch`, padded at the ends of its dimensions to the smallest known shape that contains it.

    A batch of a known shape is returned unchanged.

    Args:
        batch: a global batch.
        known: the planned shapes.
        padding: the value with which each tensor is padded, by keyword or position; for labels it
            must be one that the loss ignores.

    Raises:
        JobError: no known shape contains the batch, or `padding` lacks a tensor to be padded.
    """
    args, kwargs = call_of("Job.data", batch)
    given = shapes_of(args, kwargs)
    if given in known:
        return batch
    holds = [shapes for shapes in known if _holds(shapes, given)] if padding else []
    if not holds:
        why = "; Job.padding has no value for all of them" if padding else ""
        raise JobError(
            f"Job.data gives {shapes_text(given)}; known are"
            f" {' and '.join(map(shapes_text, known))}{why}: give batches of one shape, name the"
            " others in Job.shapes, or give Job.padding to fill smaller ones up"
        )
    target = dict(min((_elements(shapes), shapes) for shapes in holds)[1])
    short = {key.partition(".")[2] for key, shape in given if shape != target[key]}
    if missing := short - {str(key) for key in padding}:
        raise JobError(
            f"a batch of {shapes_text(given)} has to be padded, and Job.padding has no value for"
            f" {min(missing)}; it has {', '.join(map(str, padding))}"
        )
    leaves = flatten(args, kwargs)
    values = {str(key): value for key, value in padding.items()}
    padded = {
        path.partition(".")[2]: _padded(value, target[path], values[path.partition(".")[2]])
        if isinstance(value, torch.Tensor) and tuple(value.shape) != target[path]
        else value
        for path, value in leaves.items()
    }
    return padded if isinstance(batch, Mapping) else tuple(padded.values())


def require_dtypes(batch: Batch, example: Call) -> None:
    """Raise `JobError` if a tensor of `batch` has another dtype than in the planned `example`."""
    planned = flatten(*example)
    for path, value in flatten(*call_of("Job.data", batch)).items():
        wanted = getattr(planned.get(path), "dtype", None)
        if wanted is not None and isinstance(value, torch.Tensor) and value.dtype != wanted:
            raise JobError(
                f"Job.data gives {path.partition('.')[2]} in {value.dtype}, and Job.batch has it in"
                f" {wanted}: give both in one"
            )


def shapes_text(shapes: Shapes) -> str:
    """The shapes as text: `x (4, 2), y (4,)`."""
    return ", ".join(f"{key.partition('.')[2]} {shape}" for key, shape in shapes)


def _holds(shapes: Shapes, given: Shapes) -> bool:
    large, small = dict(shapes), dict(given)
    return large.keys() == small.keys() and all(
        len(large[key]) == len(small[key])
        and all(n >= m for n, m in zip(large[key], small[key], strict=True))
        for key in small
    )


def _elements(shapes: Shapes) -> int:
    return sum(prod(shape) for _, shape in shapes)


def _padded(tensor: torch.Tensor, shape: tuple[int, ...], value: float) -> torch.Tensor:
    wanted = [n - m for n, m in zip(shape, tensor.shape, strict=True)]
    return F.pad(tensor, [part for n in reversed(wanted) for part in (0, n)], value=value)


def smaller(batch: Batch, size: int) -> Batch | None:
    """The first `size` samples of an example batch.

    None unless all its tensors have the same size of their first dimension.
    """
    args, kwargs = call_of("Job.batch", batch)
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    counts = {v.shape[0] if v.dim() else 0 for v in tensors}
    if len(counts) != 1:
        return None

    def cut(value: Any) -> Any:
        return value[:size] if isinstance(value, torch.Tensor) else value

    if isinstance(batch, Mapping):
        return {key: cut(value) for key, value in batch.items()}
    return tuple(map(cut, batch))
