"""Differentiable redistribution on the ranks, with a separate backward redistribution.

Collectives run one mesh axis at a time, directly on the process group (`collectives`), or through
DTensor if a compiler or autograd must trace them. Cutting, masking and embedding a tile need no
communication and are done here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwright.ir.redistribution import SWAPS
from shardwright.program.instructions import Move, Redistribute
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.collectives import collected
from shardwright.runtime.comm.local_moves import moved_locally

Step = Callable[[torch.Tensor], torch.Tensor]  # on a tile seen as its atoms

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class Redistribution(nn.Module):
    """One `Redistribute` instruction on a device mesh, given axis by axis; none on one device."""

    def __init__(self, instruction: Redistribute, axes: Mapping[str, DeviceMesh]) -> None:
        super().__init__()
        self.value, self.text = instruction.value, instruction.text
        self.before = instruction.before
        self.after = instruction.after
        self.atoms_before = instruction.atoms_before
        self.atoms_grad = instruction.atoms_grad
        self.forward_moves: tuple[Step, ...] = _steps(instruction.forward, axes)
        self.backward_moves: tuple[Step, ...] = _steps(instruction.backward, axes)
        self.differentiable = instruction.differentiable
        narrow, wide = instruction.cast or ("", "")
        self.narrow, self.wide = getattr(torch, narrow, None), getattr(torch, wide, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The local tile of `x` in its new layout."""
        if self.differentiable:
            result: torch.Tensor = _Function.apply(x, self)  # type: ignore[no-untyped-call]
            return result
        return self.run_forward(x)

    def run_forward(self, x: torch.Tensor) -> torch.Tensor:
        """The local tile of `x` in its new layout, without autograd."""
        x = x if self.narrow is None else x.to(self.narrow)
        return _run(x, self.forward_moves, self.atoms_before, self.after)

    def sent_back(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient's tile in the layout that the producer of the value needs.

        It is differentiable if autograd is to differentiate the backward pass.
        """
        if direct(grad) or torch.compiler.is_compiling():
            return self.run_backward(grad)
        result: torch.Tensor = _Back.apply(grad, self)  # type: ignore[no-untyped-call]
        return result

    def run_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient's tile in the layout of the producer, without autograd."""
        grad = grad if self.wide is None else grad.to(self.wide)
        return _run(grad, self.backward_moves, self.atoms_grad, self.before)

    def extra_repr(self) -> str:
        return self.text


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, redistribution: Redistribution) -> torch.Tensor:
        ctx.redistribution = redistribution
        return redistribution.run_forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.redistribution.sent_back(grads[0]), None


class _Back(torch.autograd.Function):
    """The redistribution of a gradient, which can be differentiated itself.

    Operators are linear in the gradients of their results. So the gradient of a gradient has the
    layouts of the value: at the producer its own layout, at a reader the layout that is read.
    """

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, redistribution: Redistribution) -> torch.Tensor:
        ctx.redistribution = redistribution
        return redistribution.run_backward(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        result: torch.Tensor = _Function.apply(grads[0], ctx.redistribution)  # type: ignore[no-untyped-call]
        return result, None


def reduced_over(axes: Sequence[DeviceMesh]) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """A function that reduces a tensor by one of `_REDUCTIONS` over all devices along `axes`."""

    def reduce(x: torch.Tensor, how: str) -> torch.Tensor:
        for mesh in axes:
            if direct(x):
                x = x.clone(memory_format=torch.contiguous_format)
                group = mesh.get_group()
                backend_of(group).reduce(group, x, _REDUCTIONS[how])
                continue
            parts = DTensor.from_local(x.contiguous(), mesh, [Partial(how)], run_check=False)
            x = parts.redistribute(placements=[Replicate()]).to_local()
        return x

    return reduce


def direct(x: torch.Tensor) -> bool:
    """Whether `x` may be passed to the process group: neither a compiler nor autograd traces it.

    Autograd traces gradients if the backward pass is to be differentiated.
    """
    return not (torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad))


def _steps(moves: tuple[Move, ...], axes: Mapping[str, DeviceMesh]) -> tuple[Step, ...]:
    return tuple(
        partial(_move, move=move, mesh=axes.get(move.axis) if move.collective.moves_data else None)
        for move in moves
    )


def _run(
    x: torch.Tensor,
    steps: tuple[Step, ...],
    atoms: tuple[int, ...],
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Apply `steps` to a tile seen as its atoms; always a contiguous tensor of its own."""
    if not steps:
        return x.view_as(x)
    x = x.reshape(atoms)
    for step in steps:
        x = step(x)
    return x.reshape(shape).contiguous()


def _move(x: torch.Tensor, move: Move, mesh: DeviceMesh | None) -> torch.Tensor:
    """`x` after one move: directly, or through DTensor where torch traces or differentiates."""
    if not move.collective.moves_data:
        return moved_locally(x, (move,))
    assert mesh is not None
    if direct(x):
        return collected(x, move, mesh)
    if move.collective in SWAPS:
        swapped: torch.Tensor = _swapped(x, move, mesh)
        return swapped
    src: Placement = Partial() if move.src < 0 else Shard(move.src)  # data moves of no other
    dst: Placement = Replicate() if move.dst < 0 else Shard(move.dst)
    whole = DTensor.from_local(
        x.contiguous(),
        mesh,
        [src],
        run_check=False,
        shape=torch.Size(move.whole),
        stride=_contiguous_stride(move.whole),
    )
    return whole.redistribute(placements=[dst]).to_local()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _swapped(x: torch.Tensor, move: Move, mesh: DeviceMesh) -> torch.Tensor:
    """Halves in another order, which no placement of DTensor says."""
    result: torch.Tensor = _Swap.apply(x, move, mesh)  # type: ignore[no-untyped-call]
    return result


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Move, mesh: DeviceMesh) -> torch.Tensor:
        ctx.move, ctx.mesh = move, mesh
        return collected(x, move, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        there = replace(ctx.move, collective=ctx.move.collective.gradient)
        gradient: torch.Tensor = _swapped(grads[0], there, ctx.mesh)
        return gradient, None, None


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))
