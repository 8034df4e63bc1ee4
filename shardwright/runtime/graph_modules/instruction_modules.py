"""Modules for the instructions of a program that are no plain operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.graph import FUNCTION
from shardwright.ir.layout import Mesh
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Joint,
    Redistribute,
    RunModule,
    SharedAttention,
    Uniform,
)
from shardwright.rules.operators.loss_chunks import LINEAR_CROSS_ENTROPY
from shardwright.rules.operators.mlp_chunks import CHUNKED_MLP
from shardwright.runtime.attention.ring_attention import TiledAttention
from shardwright.runtime.comm.joint_reductions import joint
from shardwright.runtime.comm.p2p_group import AxisGroup
from shardwright.runtime.comm.redistribute import Redistribution, reduced_over
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.graph_modules.opaque_module import OpaqueModule, OwnFunction
from shardwright.runtime.random.dropout import (
    GlobalAttention,
    GlobalDropout,
    GlobalUniform,
    StepKeys,
)
from shardwright.runtime.random.fused_rng import FastAttention, FastDropout
from shardwright.runtime.sharded_ops.chunked import ChunkedDroppedMlp, ChunkedLoss, ChunkedMlp
from shardwright.runtime.sharded_ops.experts import local_experts
from shardwright.runtime.sharded_ops.fp8_linear import Fp8Linear
from shardwright.tracing.graph_builder import Captured


def module_maker(
    captured: Captured,
    mesh: Mesh,
    device_mesh: DeviceMesh | None,
    device: torch.device,
    training: bool,
) -> Callable[[Special], nn.Module]:
    """A function that makes an instruction's module for `to_module`, for one rank of `mesh`."""
    # Once for all redistributions: taking an axis out of a device mesh is slow.
    axes = {name: device_mesh[name] for name in mesh.names} if device_mesh is not None else {}
    fast = captured.graph.numerics.rng == "fast"
    keys = StepKeys()

    def make(instruction: Special) -> nn.Module:
        match instruction:
            case Redistribute():
                return Redistribution(instruction, axes)
            case Compute():
                return _operator(instruction, captured, axes, device)
            case Dropout():
                return (
                    FastDropout(instruction, device)
                    if fast
                    else GlobalDropout(instruction, device, keys)
                )
            case Attention():
                return (
                    FastAttention(instruction, device)
                    if fast
                    else GlobalAttention(instruction, device, keys)
                )
            case DroppedMlp():
                return ChunkedDroppedMlp(instruction, device, keys)
            case Joint():
                return joint(instruction, reduced_over([axes[name] for name in instruction.axes]))
            case SharedAttention():
                return TiledAttention(instruction, AxisGroup(axes[instruction.axis]))
            case RunModule():
                key = str(instruction.op.args[1])
                return OpaqueModule(instruction, captured.opaque[key], device, training)
            case Uniform():
                return GlobalUniform(instruction, device, keys)

    return make


def _operator(
    instruction: Compute,
    captured: Captured,
    axes: Mapping[str, DeviceMesh],
    device: torch.device,
) -> nn.Module:
    """The module of an operator that is none of torch."""
    if instruction.op.target == FUNCTION:
        return OwnFunction(captured.opaque[str(instruction.op.args[1])])
    if instruction.op.target == LINEAR_CROSS_ENTROPY:
        return ChunkedLoss()
    if instruction.op.target == CHUNKED_MLP:
        return ChunkedMlp()
    if instruction.scaling:
        return Fp8Linear(instruction.scaling)
    assert instruction.routing is not None, "torch has the operator"
    return local_experts(instruction.routing, axes, device)
