"""One module for the variants of a region, which differ only in where their tiles start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardwright.program.instructions import Instruction, writes
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.graph_modules.indexed_offsets import Varied, module_of


def chosen_by(
    number: torch.Tensor,
    variants: Sequence[Sequence[Instruction]],
    make: Callable[[Special], nn.Module],
    device: torch.device,
) -> Callable[[Special], nn.Module]:
    """`make`, but of instructions that differ a module that does what `variants[number]` does."""
    varied: dict[str, list[Varied]] = {}
    for found in zip(*variants, strict=True):
        alternatives = [one for one in found if isinstance(one, Varied)]
        if any(one != found[0] for one in alternatives):
            varied[writes(found[0])[0]] = alternatives

    def chosen(instruction: Special) -> nn.Module:
        name = writes(instruction)[0]
        if isinstance(instruction, Varied) and name in varied:
            return module_of(varied[name], number, make(instruction), device)
        return make(instruction)

    return chosen
