"""Observes autograd on the operators of a program; equal calls are observed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwright.ir.graph import FUNCTION, OPAQUE, Arg, Op, Ref, Tensor
from shardwright.tracing.export.opaque import OpaqueCall, sample_like
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.gradients.autograd import AutogradFacts, observe
from shardwright.tracing.own_operators.fused_norm import on_accelerators


@final
class AutogradProbe:
    """Runs single operators on meta tensors, and modules that are kept whole on their weights."""

    def __init__(self, model: nn.Module, opaque: Mapping[str, Any]) -> None:
        self.model = model
        self.opaque = opaque
        self._known: dict[Any, AutogradFacts] = {}

    def facts(self, op: Op, tensors: Mapping[str, Tensor], values: Any) -> AutogradFacts:
        """The facts of `op`, with operands described in `tensors` and results `values`."""
        operands = list(dict.fromkeys(op.operands))
        described = [tensors[name] for name in operands]
        position = {name: i for i, name in enumerate(operands)}
        key = (
            op.target,
            _renamed(op.args, position),
            tuple((k, _renamed((v,), position)) for k, v in op.kwargs),
            tuple((t.shape, t.dtype, t.requires_grad) for t in described),
        )
        if op.target == OPAQUE:
            return self._opaque_facts(op, tensors)
        if key not in self._known:
            leaves = [
                torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta").requires_grad_(
                    t.requires_grad
                )
                for t in described
            ]

            if op.target == FUNCTION and not self.opaque[str(op.args[1])].on_meta:
                leaves = [
                    sample_like(t, torch.Generator(device="cpu").manual_seed(0)).requires_grad_(
                        t.requires_grad
                    )
                    for t in leaves
                ]
            device = leaves[0].device if leaves else torch.device("meta")

            kernel = on_accelerators(op, [t.dtype for t in described])

            def call(given: list[torch.Tensor]) -> list[torch.Tensor]:
                return call_op(kernel, dict(zip(operands, given, strict=True)), device)

            facts = observe(call, leaves)
            if op.kind == "scaled_dot_product_attention":
                facts = _fused_attention(facts, described, values[0])
            self._known[key] = facts
        return self._known[key]

    def _opaque_facts(self, op: Op, tensors: Mapping[str, Tensor]) -> AutogradFacts:
        """The facts of a module kept whole, from a run on its weights and random numbers."""
        operands = list(dict.fromkeys(op.operands))
        key = op.args[1]
        assert isinstance(key, str)
        call: OpaqueCall = self.opaque[key]
        generator = torch.Generator(device="cpu").manual_seed(0)
        own = [self._own(f"{call.path}.{name}") for name in call.names]
        given = [tensors[name] for name in op.operands[len(own) :]]
        drawn = [
            sample_like(torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta"),
                        generator, own)
            for t in given
        ]  # fmt: skip
        by_name = dict(zip(op.operands, [*own, *drawn], strict=True))
        leaves = [by_name[n].detach().requires_grad_(tensors[n].requires_grad) for n in operands]

        def run(values: list[torch.Tensor]) -> list[torch.Tensor]:
            named = dict(zip(operands, values, strict=True))
            return call([named[name] for name in op.operands])

        with torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            facts = observe(run, leaves)
        passes = 3 if any(facts.requires_grad) else 1  # the backward pass costs two forward passes
        return replace(facts, flop=passes * counter.get_total_flops())

    def _own(self, key: str) -> torch.Tensor:
        """A parameter or buffer of the model."""
        path, _, name = key.rpartition(".")
        found = getattr(self.model.get_submodule(path), name)
        assert isinstance(found, torch.Tensor)
        return found.detach()


def _renamed(arg: Arg, position: Mapping[str, int]) -> Any:
    if isinstance(arg, Ref):
        return Ref(str(position[arg.name]))
    if isinstance(arg, tuple):
        return tuple(_renamed(a, position) for a in arg)
    return (type(arg).__name__, arg)


def _fused_attention(facts: AutogradFacts, operands: list[Tensor], out: Any) -> AutogradFacts:
    """The tensors that the fused kernels save: q, k, v, the output, and a log-sum-exp per query.

    On meta tensors torch takes the unfused path, which saves the whole score matrix.
    """
    if not facts.requires_grad[0]:
        return facts
    rows = out.numel() // out.shape[-1]
    return replace(
        facts, saved_operands=tuple(range(len(operands))), saved_results=(0,), extra_saved=rows * 4
    )
