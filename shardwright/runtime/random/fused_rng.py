"""Seeds torch's own random kernels for one call at a time: `rng="fast"`.

The seed is a hash of the run's seed, the step, the operator and the position of the tile in the
whole tensor. So ranks with the same tile draw the same numbers, ranks with different tiles draw
different ones, and a resumed run draws the same numbers as an uninterrupted one. A plan with other
tiles draws other numbers.

Numbers are torch's, which differ between kinds of device. Seeding reads the
step on the host: `torch.compile` breaks its graph at these calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import with_argument
from shardwright.program.instructions import Attention, Dropout
from shardwright.tracing.export.operators import call_op


def seed_of(state: torch.Tensor, *what: object) -> int:
    """A seed for one call, from a `random_state` and whatever else distinguishes calls."""
    seed, step = state[:2].tolist()
    digest = hashlib.blake2b(repr((seed, step, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def number_in(state: torch.Tensor, number: int) -> int:
    """The number of an operator that draws, to which a `random_state` may add."""
    return number + int(state[2:].sum())


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch draws on `device` from `seed`; afterwards its generator is as it was before."""
    if device.type == "cpu":
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)
        return
    module = torch.get_device_module(device)
    before = module.get_rng_state(device)
    with module.device(device):
        module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(before, device)


class FastDropout(nn.Module):
    """One `Dropout` instruction by torch's own kernel. In eval mode it does nothing."""

    def __init__(self, instruction: Dropout, device: torch.device) -> None:
        super().__init__()
        probability, number = instruction.op.args[1:3]
        assert isinstance(probability, float) and isinstance(number, int)
        self.probability, self.device = probability, device
        self.what = ("dropout", number, instruction.positions)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Zero each element with the given probability, scale the others by 1 / (1 - p)."""
        if not self.training:
            return x
        return drawn(lambda: F.dropout(x, self.probability), self.what, state, self.device)


class FastAttention(nn.Module):
    """One `Attention` instruction by torch's fused kernel. In eval mode it drops nothing."""

    def __init__(self, instruction: Attention, device: torch.device) -> None:
        super().__init__()
        self.op, self.device = instruction.op, device
        self.quiet = with_argument(instruction.op, 4, "dropout_p", 0.0)
        self.what = ("attention", instruction.number, instruction.positions)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Query, key, value, a mask if there is one, and the random state."""
        *tensors, state = given
        values = dict(zip(self.op.operands, tensors, strict=True))
        if not self.training:
            return call_op(self.quiet, values, self.device)[0]

        def draw() -> torch.Tensor:
            return call_op(self.op, values, self.device)[0]

        return drawn(draw, self.what, state, self.device)


def _drawn(
    draw: Callable[[], torch.Tensor],
    what: tuple[str, int, object],
    state: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    kind, number, positions = what
    with seeded(seed_of(state, (kind, number_in(state, number), positions)), device):
        return draw()


drawn: Callable[..., torch.Tensor] = torch.compiler.disable(_drawn)
